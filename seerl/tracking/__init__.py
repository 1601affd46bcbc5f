"""Where metrics and answers go: the console, files and tracking services."""

from seerl.tracking.fanout import Trackers, make_trackers

__all__ = ["Trackers", "make_trackers"]

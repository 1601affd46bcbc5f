"""The configuration: its schema, how it is read, and what must hold before anything is loaded."""

from seerl.config.checks import Report, check_config, check_or_raise
from seerl.config.explain import describe, explain
from seerl.config.loading import Loaded, changed_keys, dump_config, load_config
from seerl.config.schema import Config

__all__ = [
    "Config",
    "Loaded",
    "Report",
    "changed_keys",
    "check_config",
    "check_or_raise",
    "describe",
    "dump_config",
    "explain",
    "load_config",
]

"""The configuration: its schema, how it is read, and what must hold before anything is loaded."""

from seerl.config.schema import Config

__all__ = ["Config"]

"""SeeRL: reinforcement learning for models that see."""

__version__ = "0.1.0"

"""How much the last queries attend to each stored key."""

from .api import window_importance

__all__ = ["window_importance"]

"""Positions of the tokens that came since the last eviction."""

from .api import append_positions

__all__ = ["append_positions"]

"""How much each stored key repeats the others of its head."""

from .api import redundancy

__all__ = ["redundancy"]

"""A full-sequence forward under the evictions that a rollout really had."""

from .context import replay

__all__ = ["replay"]

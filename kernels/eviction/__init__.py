"""Eviction in place: which tokens stay, and how their rows come to the first slots."""

from .api import compact, fill_holes, plan_compaction, plan_hole_filling
from .types import HoleFilling

__all__ = ["HoleFilling", "compact", "fill_holes", "plan_compaction", "plan_hole_filling"]

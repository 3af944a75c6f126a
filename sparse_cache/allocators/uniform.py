"""The same budget for every layer and head."""

from __future__ import annotations

from dataclasses import dataclass

from .base import BudgetAllocator, register_allocator


@register_allocator("uniform")
@dataclass(frozen=True)
class UniformAllocator(BudgetAllocator):
    """Every layer and KV head has the budget."""

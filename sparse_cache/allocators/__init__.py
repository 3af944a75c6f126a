"""How a budget is divided among layers and KV heads: one file an allocator, found by themselves.

Every module of this package is imported here, so a new allocator is a new file and nothing else.
"""

from importlib import import_module
from pkgutil import iter_modules

from .base import (
    BudgetAllocator,
    allocator_class,
    allocator_names,
    checked_head_counts,
    checked_layer_budgets,
    register_allocator,
    resolve_allocator,
)

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BudgetAllocator",
    "allocator_class",
    "allocator_names",
    "checked_head_counts",
    "checked_layer_budgets",
    "register_allocator",
    "resolve_allocator",
]

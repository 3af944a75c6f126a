"""Run language models under a fixed KV-cache budget."""

# ruff: noqa: E402
from .compatibility import check_transformers

check_transformers()

from .allocators import BudgetAllocator, allocator_names, register_allocator
from .cache import SparseBudgetCache
from .errors import UnsupportedModelError
from .policies import EvictionPolicy, PolicyView, policy_names, register_policy
from .statistics import CacheStats
from .trace import NEVER, EvictionTrace

__all__ = [
    "NEVER",
    "BudgetAllocator",
    "CacheStats",
    "EvictionPolicy",
    "EvictionTrace",
    "PolicyView",
    "SparseBudgetCache",
    "UnsupportedModelError",
    "allocator_names",
    "policy_names",
    "register_allocator",
    "register_policy",
]

"""Run language models under a fixed KV-cache budget."""

# ruff: noqa: E402
from .compatibility import check_transformers

check_transformers()

from .cache import SparseBudgetCache
from .errors import UnsupportedModelError
from .policies import EvictionPolicy, PolicyView, policy_names, register_policy
from .statistics import CacheStats
from .trace import NEVER, EvictionTrace

__all__ = [
    "NEVER",
    "CacheStats",
    "EvictionPolicy",
    "EvictionTrace",
    "PolicyView",
    "SparseBudgetCache",
    "UnsupportedModelError",
    "policy_names",
    "register_policy",
]

"""Eviction policies: one file each, found by themselves.

Every module of this package is imported here, so a new policy is a new file and nothing else.
A module whose name starts with an underscore is not a policy.
"""

from importlib import import_module
from pkgutil import iter_modules

from .base import (
    EvictionPolicy,
    LayersView,
    PolicyView,
    policy_class,
    policy_names,
    register_policy,
    resolve_policy,
)

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        import_module(f"{__name__}.{_module.name}")

__all__ = [
    "EvictionPolicy",
    "LayersView",
    "PolicyView",
    "policy_class",
    "policy_names",
    "register_policy",
    "resolve_policy",
]

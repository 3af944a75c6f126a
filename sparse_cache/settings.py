"""The arguments of a cache, checked once at construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral, Real

import torch

from .allocators import BudgetAllocator, resolve_allocator
from .kernels.availability import missing_for_triton
from .policies import EvictionPolicy
from .quantization import QUANTIZATIONS

BACKENDS = ("auto", "torch", "triton")


@dataclass(frozen=True)
class BudgetSettings:
    """How much is kept and when the rest is evicted. See `SparseBudgetCache` for the meaning.

    Raises:
        ValueError: a value out of range; the message names the argument, the value and the fix.
        TypeError: an argument of the wrong type.
    """

    budget: int | float
    policy: EvictionPolicy
    interval: int
    window: int
    sinks: int
    record: bool
    static: bool
    backend: str
    quantization: str | None
    allocation: BudgetAllocator = field(default_factory=lambda: resolve_allocator("uniform"))

    def __post_init__(self) -> None:
        for name, least in (("interval", 1), ("window", 1), ("sinks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be an int, got {value!r}; pass a whole number.")
            if value < least:
                raise ValueError(f"{name}={value} is too small; it must be at least {least}.")
            object.__setattr__(self, name, int(value))
        self._check_budget()
        if self.backend not in BACKENDS:
            raise ValueError(
                f"backend={self.backend!r} is unknown; choose one of {', '.join(BACKENDS)}."
            )
        if self.quantization not in QUANTIZATIONS:
            raise ValueError(
                f"quantization={self.quantization!r} is unknown; choose one of "
                f"{', '.join(map(repr, QUANTIZATIONS))}."
            )
        if self.quantization and self.allocation.shares_heads:
            raise ValueError(
                f"quantization={self.quantization!r} does not go with allocation="
                f"{self.allocation.name!r}, whose heads lie in one pool; use one of the two."
            )
        if self.backend == "triton":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if missing := missing_for_triton(device):
                raise ValueError(f"backend='triton' cannot run: {missing}; or use backend='auto'.")
        for name in ("record", "static"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.static and not isinstance(self.budget, int):
            raise ValueError(
                f"static=True needs tensors of one size, but budget={self.budget} is a share of "
                "the tokens seen, which grows; pass a number of tokens."
            )

    def _check_budget(self) -> None:
        budget, protected = self.budget, self.protected
        if isinstance(budget, bool) or not isinstance(budget, Real):
            raise TypeError(
                f"budget must be an int (tokens) or a float in (0, 1) (share of the tokens seen), "
                f"got {budget!r}."
            )
        if isinstance(budget, Integral):
            if budget < 1:
                raise ValueError(f"budget={budget} keeps nothing; pass at least 1 token.")
            if budget < protected:
                raise ValueError(
                    f"budget={budget} is smaller than window + sinks = {self.window} + "
                    f"{self.sinks}, which are always kept; raise budget to at least {protected} "
                    "or lower window or sinks."
                )
            object.__setattr__(self, "budget", int(budget))
        elif not (math.isfinite(budget) and 0.0 < budget < 1.0):
            raise ValueError(
                f"budget={budget} is neither a number of tokens nor a share; pass an int of at "
                f"least {protected}, or a float between 0 and 1 (both excluded)."
            )

    @property
    def protected(self) -> int:
        """Tokens that no policy may evict."""
        return self.window + (self.sinks if self.policy.keeps_sinks else 0)

    def kept_after_eviction(self, tokens_seen: int) -> int:
        """Tokens that a row keeps when it evicts after having seen `tokens_seen` real tokens."""
        if isinstance(self.budget, int):
            return self.budget
        return max(math.ceil(self.budget * tokens_seen), self.protected)

    def eviction_length(self, tokens_seen_at_last_eviction: int) -> int:
        """Stored tokens at which a row evicts next, given what it had seen when it last did."""
        return self.kept_after_eviction(tokens_seen_at_last_eviction) + self.interval

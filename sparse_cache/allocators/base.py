"""What an allocator decides, how its answers are checked, and how it is found by name."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch

from ..registry import Registry


@dataclass(frozen=True)
class BudgetAllocator(ABC):  # noqa: B024 - each of its methods has a sensible default
    """Divides the budget among layers (before the first token) and KV heads (at each eviction).

    A subclass is a frozen dataclass: its fields are its options. It holds no state between calls.
    Whatever it decides, all layers together hold as many tokens as under a uniform budget.
    """

    name: ClassVar[str] = ""
    """Set by [`register_allocator`]."""
    paper: ClassVar[str] = ""
    """Where the method is described, as a URL."""
    varies_by_layer: ClassVar[bool] = False
    """Whether [`layer_budgets`][BudgetAllocator.layer_budgets] may differ between layers."""
    shares_heads: ClassVar[bool] = False
    """Whether [`head_counts`][BudgetAllocator.head_counts] may differ between KV heads."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for method, flag in (("layer_budgets", "varies_by_layer"), ("head_counts", "shares_heads")):
            if getattr(cls, method) is not getattr(BudgetAllocator, method) and not getattr(
                cls, flag
            ):
                raise TypeError(
                    f"{cls.__name__} has a {method} of its own, which is asked only where "
                    f"{flag} = True; set that in the class."
                )

    def check_budget(self, budget: int | float) -> None:  # noqa: B027 - any budget will do
        """Refuse a budget that this allocator can serve for no model.

        Raises:
            ValueError: it cannot; the message says which it can.
        """

    def layer_budgets(
        self, budget: int | float, layers: int, protected: int
    ) -> list[int] | list[float]:
        """The budget of each budgeted layer, first to last.

        Args:
            budget: what a layer gets on average: tokens, or a share in (0, 1) of those seen.
            layers: budgeted layers.
            protected: tokens of each head that are never evicted (window and sinks).

        Returns:
            `layers` numbers whose mean is `budget`, whole if `budget` is.
        """
        return [budget] * layers

    def head_counts(self, scores: torch.Tensor, lengths: torch.Tensor, keep: int) -> torch.Tensor:
        """How many tokens each KV head keeps in some rows that evict.

        A row's answer may depend on nothing but that row.

        Args:
            scores: `[b, H, S]` float32 without NaN. The tokens of a head are its last `lengths`
                places along `S`, in the order of the sequence; -inf in the places before them, and
                +inf for tokens that stay in any case. What a head keeps are its highest scores.
            lengths: `[b, H]` int64, tokens that each head holds.
            keep: tokens to keep per head on average.

        Returns:
            `[b, H]` int64: at least the head's tokens that stay in any case, at most its length,
            `H * keep` in every row.
        """
        return torch.full_like(lengths, keep)

    def options(self) -> dict[str, Any]:
        """The allocator's options by name, as given at construction."""
        return dataclasses.asdict(self)


def checked_layer_budgets(
    allocation: BudgetAllocator, budget: int | float, layers: int, protected: int
) -> list[int] | list[float]:
    """`allocation.layer_budgets(...)`, or an error if that breaks its promises.

    Raises:
        ValueError: another number of budgets, another total, or a layer that would lose tokens
            which are always kept.
    """
    budgets = allocation.layer_budgets(budget, layers, protected)
    who = f"allocation {allocation.name or type(allocation).__name__!r}"
    if len(budgets) != layers:
        raise ValueError(f"{who} gave {len(budgets)} budgets for {layers} budgeted layers.")
    if isinstance(budget, int):
        if not all(isinstance(each, Integral) for each in budgets):
            raise ValueError(f"{who} must give whole numbers of tokens, it gave {budgets}.")
        if sum(budgets) != layers * budget:
            raise ValueError(
                f"{who} gave {sum(budgets)} tokens to {layers} layers; a budget of {budget} "
                f"is {layers * budget} in total."
            )
        if min(budgets) < protected:
            raise ValueError(
                f"{who} gives a layer only {min(budgets)} of the {protected} tokens that window "
                "and sinks always keep; raise budget, make the allocation flatter, or lower "
                "window or sinks."
            )
        return [int(each) for each in budgets]
    if not all(0.0 < each < 1.0 for each in budgets):
        raise ValueError(f"{who} must give shares between 0 and 1, it gave {budgets}.")
    if not math.isclose(sum(budgets), layers * budget, rel_tol=1e-6):
        raise ValueError(f"{who} gave shares of mean {sum(budgets) / layers}, not {budget}.")
    return [float(each) for each in budgets]


def checked_head_counts(
    allocation: BudgetAllocator, scores: torch.Tensor, lengths: torch.Tensor, keep: int
) -> list[list[int]]:
    """`allocation.head_counts(...)` on the host, or an error if that breaks its promises.

    Raises:
        ValueError: counts of a wrong shape or total, more tokens than a head has, or fewer than
            those that stay in any case.
    """
    counts = allocation.head_counts(scores, lengths, keep)
    who = f"allocation {allocation.name or type(allocation).__name__!r}"
    if not isinstance(counts, torch.Tensor) or counts.shape != lengths.shape:
        raise ValueError(
            f"{who} must give one count for each of {list(lengths.shape)} rows and KV heads, got "
            f"{list(counts.shape) if isinstance(counts, torch.Tensor) else type(counts).__name__}."
        )
    if counts.is_floating_point() or counts.is_complex() or counts.device != lengths.device:
        raise ValueError(
            f"{who} must give whole numbers on {lengths.device}, got {counts.dtype} on "
            f"{counts.device}."
        )
    least = torch.isposinf(scores).sum(-1)
    # One look at the device for all three.
    table = torch.stack([counts.to(lengths), lengths, least.to(lengths)]).tolist()
    for row_counts, row_lengths, row_least in zip(*table, strict=True):
        if sum(row_counts) != keep * len(row_counts):
            raise ValueError(
                f"{who} shared {sum(row_counts)} tokens among {len(row_counts)} heads, not "
                f"{keep} each on average."
            )
        for count, length, floor in zip(row_counts, row_lengths, row_least, strict=True):
            if not floor <= count <= length:
                raise ValueError(
                    f"{who} lets a head keep {count} tokens; it has {length}, of which {floor} "
                    "are always kept."
                )
    return table[0]


_REGISTRY: Registry[BudgetAllocator] = Registry(
    "allocation", "allocations", BudgetAllocator, "register_allocator"
)


def register_allocator(
    name: str,
) -> Callable[[type[BudgetAllocator]], type[BudgetAllocator]]:
    """Class decorator: make an allocator known as `name`, for `SparseBudgetCache(allocation=name)`.

    Raises:
        ValueError: another class is registered under `name`.
        TypeError: `name` is not a non-empty string, or the class is no [`BudgetAllocator`].
    """
    return _REGISTRY.register(name)


def allocator_names() -> list[str]:
    """Names of all registered allocators, sorted."""
    return _REGISTRY.names()


def allocator_class(name: str) -> type[BudgetAllocator]:
    """The class registered under `name`.

    Raises:
        ValueError: the name is unknown (the message lists the known ones).
    """
    return _REGISTRY.get(name)


def resolve_allocator(allocation: str | BudgetAllocator) -> BudgetAllocator:
    """Turn a name or an allocator into an allocator.

    Raises:
        ValueError: the name is unknown (the message lists the known ones).
        TypeError: `allocation` is neither a name nor a [`BudgetAllocator`].
    """
    return _REGISTRY.resolve(allocation)

"""Ada-KV: the heads of a layer compete for its budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch

from .base import BudgetAllocator, register_allocator


@register_allocator("adaptive")
@dataclass(frozen=True)
class AdaptiveAllocator(BudgetAllocator):
    """One ranking over all KV heads of a layer decides how many tokens each of them keeps.

    Heads whose attention is spread keep more, heads that look at few tokens keep less, and the
    layer as a whole keeps `H * budget`. The published safeguard mixes the counts of the ranking
    with uniform ones and rounds; here each head first takes its best `floor * budget` tokens (and
    always its window and sinks), and the rest of the budget goes by the ranking, so the total is
    exact and the floor a guarantee. Among equal scores the more recent token stays.

    The ranking compares scores between heads, so it means most for policies whose scores are
    attention probabilities (`snapkv`, `tova`, `h2o`).

    Raises:
        ValueError: `floor` is not a number in [0, 1].
    """

    shares_heads: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2407.11550"

    floor: float = 0.2
    """Share of the budget that each head keeps in any case; 1 is uniform."""

    def __post_init__(self) -> None:
        floor = self.floor
        if isinstance(floor, bool) or not isinstance(floor, Real) or not 0 <= floor <= 1:
            raise ValueError(f"floor must be a number in [0, 1], got {floor!r}.")

    def head_counts(self, scores: torch.Tensor, lengths: torch.Tensor, keep: int) -> torch.Tensor:
        """See `BudgetAllocator.head_counts`."""
        heads, places = scores.shape[1:]
        # Newest first, so that a stable sort prefers the recent among equals.
        newest_first = scores.flip(-1)
        order = newest_first.sort(dim=-1, descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(places, device=order.device).expand_as(order)
        )
        own = math.ceil(self.floor * keep - 1e-9)
        there = torch.arange(places, device=order.device) < lengths.unsqueeze(-1)
        newest_first = newest_first.masked_fill((rank < own) & there, torch.inf)
        # By age and then by head, for ties between heads.
        joint = newest_first.transpose(1, 2).flatten(1)
        chosen = joint.sort(dim=-1, descending=True, stable=True).indices[:, : heads * keep]
        return torch.zeros_like(lengths).scatter_add_(
            1, chosen % heads, torch.ones_like(chosen, dtype=lengths.dtype)
        )

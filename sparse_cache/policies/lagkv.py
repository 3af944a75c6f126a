"""LagKV: tokens that stand out against the tokens that follow them stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import EvictionPolicy, PolicyView, register_policy

_SMALLEST_RANGE = 1e-6


def _spread_against_next(states: torch.Tensor) -> torch.Tensor:
    """Score tokens by how unevenly they fill the range of the next partition.

    Args:
        states: float32 `[B, H, P, L, D]`, keys or values in `P` partitions of `L` tokens.

    Returns:
        float32 `[B, H, P - 1, L]`; the last partition has no next one. Sums to one over `L`.
    """
    low, high = states[:, :, 1:].aminmax(dim=3, keepdim=True)
    # A channel that is constant over the next partition has no range to divide by.
    relative = (states[:, :, :-1] - low) / (high - low).clamp_min(_SMALLEST_RANGE)
    # The spread of a single channel is zero, where the unbiased estimate has no value.
    return relative.std(dim=-1, correction=min(1, states.shape[-1] - 1)).softmax(dim=-1)


@register_policy("lagkv")
@dataclass(frozen=True)
class LagKVPolicy(EvictionPolicy):
    """Keep the tokens whose keys and values differ most from the partition after theirs.

    The tokens after the sinks are cut into partitions of `lag_size`. Each channel is scaled by the
    minimum and maximum it takes in the next partition; the standard deviation over channels,
    softmaxed over the partition, is the score, averaged over keys and values. The last whole
    partition and the rest behind it have no reference and stay.

    Differences from the paper: its cache keeps a share of every partition for good and so grows
    with the sequence; here the stored tokens are cut anew at each eviction and compete for a fixed
    budget. Where fewer than four partitions fit, they shrink to a quarter of the stored tokens,
    so that small budgets are not left with recency alone.

    Raises:
        ValueError: an option is out of its range.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2504.04704"

    lag_size: int = 128
    """Tokens in a partition."""
    rank_in_partition: bool = True
    """Compare ranks within partitions, so that each keeps about the same share, as in the paper.
    False compares the scores of all partitions directly."""

    def __post_init__(self) -> None:
        if isinstance(self.lag_size, bool) or not isinstance(self.lag_size, int):
            raise ValueError(f"lag_size must be an integer, got {self.lag_size!r}.")
        if self.lag_size < 2:
            raise ValueError(f"lag_size must be at least 2, got {self.lag_size}.")
        if not isinstance(self.rank_in_partition, bool):
            raise ValueError(
                f"rank_in_partition must be True or False, got {self.rank_in_partition!r}."
            )

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return scores in `[0, 1]`, and above 1 for tokens without a reference.

        Returns:
            float32 `[B, H, S]`. Tokens without a reference are ordered by recency.
        """
        stored = view.keys.shape[2]
        sinks = min(view.sinks, stored)
        lag = max(2, min(self.lag_size, (stored - sinks) // 4))
        partitions = (stored - sinks) // lag
        recency = torch.arange(stored, device=view.keys.device) / stored
        scores = (1 + recency).expand(view.keys.shape[:3]).clone()
        if partitions < 2:
            return scores

        cut = slice(sinks, sinks + partitions * lag)
        keys = view.keys[:, :, cut].float().unflatten(2, (partitions, lag))
        values = view.values[:, :, cut].float().unflatten(2, (partitions, lag))
        information = (_spread_against_next(keys) + _spread_against_next(values)) / 2
        if self.rank_in_partition:
            # Stable, so that of two equal tokens the more recent one ranks higher.
            information = information.argsort(dim=-1, stable=True).argsort(dim=-1) / lag
        scores[:, :, sinks : sinks + (partitions - 1) * lag] = information.flatten(2)
        return scores

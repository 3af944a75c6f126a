"""What to do about rollouts that were sampled by another policy than the learner's: reject those
that the dense policy would hardly have produced, and weight the rest by how likely it was to.

Sparse-RL (https://arxiv.org/abs/2601.10079), with the levels and bounds that later work asks for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .aggregation import Total, _only_here

LEVELS = ("token", "sequence", "geometric")
BOUNDS = ("truncate", "mask")
_LARGEST = 20.0
"""Of a log-ratio: squares of e^20, summed over any batch, are still float32."""


class Correction(NamedTuple):
    """What `correct` returns."""

    kept: torch.Tensor
    """`[N, R]` boolean: tokens that stay in the batch."""
    weights: torch.Tensor
    """`[N, R]` float32: of each token, mean 1 over those that stay if normalised; 0 elsewhere."""
    rejected: torch.Tensor
    """`[N]` boolean: rollouts that left as a whole."""
    raw: torch.Tensor
    """`[N, R]` float32: the ratios before any bound, e^20 at most; 1 for padding."""


def log_ratios(
    dense: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor, level: str
) -> torch.Tensor:
    """`log xi`, `[N, R]` float32: of each token, or the same for all tokens of a rollout: the sum
    over its tokens (`"sequence"`) or their mean (`"geometric"`, https://arxiv.org/abs/2507.18071).
    """
    # Not by a product: padding may have any numbers.
    logs = (dense.float() - sampled.float()).detach().masked_fill(~mask, 0.0)
    if level == "token":
        return logs
    sums = logs.sum(1, keepdim=True)
    if level == "geometric":
        sums = sums / mask.sum(1, keepdim=True).clamp(min=1)
    return sums.expand_as(logs).masked_fill(~mask, 0.0)


def correct(
    dense: torch.Tensor,
    sampled: torch.Tensor,
    mask: torch.Tensor,
    *,
    reject: str | None = "token",
    reject_below: float = 1e-4,
    reject_above: float = float("inf"),
    reweight: str | None = "token",
    weight_bounds: str = "truncate",
    weight_low: float = 0.0,
    weight_high: float = 1.5,
    normalise: bool = True,
    total: Total = _only_here,
) -> Correction:
    """Reject and reweight rollouts by `xi = d / s`.

    A rollout is rejected if `xi` at the level `reject` lies outside of
    `[reject_below, reject_above]`: for `"token"`, of any of its tokens. What is left is weighted by
    `xi` at the level `reweight`, truncated to `[weight_low, weight_high]`, or masked: tokens
    outside leave the batch.

    Args:
        dense: `[N, R]`, of the dense policy, nats.
        sampled: `[N, R]`, of the sampler, nats.
        mask: `[N, R]` boolean, the completions' tokens.
        reject: `"token"`, `"sequence"`, `"geometric"`, or None for no rejection.
        reject_below, reject_above: bounds of the ratio.
        reweight: as `reject`.
        weight_bounds: `"truncate"` or `"mask"`.
        weight_low, weight_high: bounds of the weight.
        normalise: whether the weights' mean over the batch's tokens is made 1.
        total: sums over processes.

    Raises:
        ValueError: an unknown level or kind of bounds, or bounds that are not ascending.
    """
    _check(reject, reweight, weight_bounds)
    for name, low, high in (
        ("reject", reject_below, reject_above),
        ("weight", weight_low, weight_high),
    ):
        if not 0 <= low < high:
            raise ValueError(f"the bounds of {name}, {low} and {high}, must be ascending from 0.")
    rejected = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    if reject is not None:
        # In log space: a ratio of a long rollout over- or underflows float32.
        logs = log_ratios(dense, sampled, mask, reject)
        low, high = _log(reject_below), _log(reject_above)
        outside = (logs < low) | (logs > high) | logs.isnan()
        rejected = (outside & mask).any(1)
    kept = mask & ~rejected[:, None]
    logs = log_ratios(dense, sampled, mask, reweight or "token")
    raw = logs.clamp(max=_LARGEST).exp()
    if reweight is None:
        return Correction(kept, kept.float(), rejected, raw)
    if weight_bounds == "mask":
        kept = kept & (logs >= _log(weight_low)) & (logs <= _log(weight_high))
    weights = raw.clamp(weight_low, weight_high).masked_fill(~kept, 0.0)
    if normalise:
        mean = total(weights.sum()) / total(kept.float().sum()).clamp(min=1)
        weights = weights / mean.clamp(min=torch.finfo(torch.float32).tiny)
    return Correction(kept, weights, rejected, raw)


def _log(bound: float) -> float:
    return float(torch.tensor(bound, dtype=torch.float64).log())


def _check(reject: str | None, reweight: str | None, weight_bounds: str) -> None:
    for name, level in (("reject", reject), ("reweight", reweight)):
        if level is not None and level not in LEVELS:
            raise ValueError(f"{name}={level!r} is unknown; choose one of {', '.join(LEVELS)}.")
    if weight_bounds not in BOUNDS:
        raise ValueError(
            f"weight_bounds={weight_bounds!r} is unknown; choose one of {', '.join(BOUNDS)}."
        )

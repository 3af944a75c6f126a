"""The figures of a step, over all processes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from accelerate import Accelerator

from .objectives import k1, k3
from .update import Batch

TAIL = 0.05
"""The quantile of `xi` that foretells a collapse (https://arxiv.org/abs/2606.08446)."""
LOST = 1e-4
"""Sparse-RL's bound for the ratio of a token (https://arxiv.org/abs/2601.10079)."""


def gather_values(accelerator: Accelerator, values: torch.Tensor) -> torch.Tensor:
    """`values`, `[n]` with another `n` in each process, of all processes, on the CPU."""
    values = values.float()
    if accelerator.num_processes > 1:
        values = accelerator.pad_across_processes(values, pad_index=float("nan"))
        values = accelerator.gather(values)
        values = values[~values.isnan()]
    return values.cpu()


def step_metrics(
    batch: Batch, gather: Callable[[torch.Tensor], torch.Tensor], group: int
) -> dict[str, float]:
    """What is logged of every step's rollouts, see the keys.

    `mismatch/*` compare the sampler with the dense policy at the same weights, over all sampled
    tokens, before anything is rejected or bounded. They are 0 and 1 for dense rollouts.

    Args:
        batch: of this process.
        gather: of values of all processes.
        group: rollouts of a prompt.
    """
    rollouts, mask = batch.rollouts, batch.rollouts.mask
    rewards = gather(batch.rewards)
    lengths = gather(rollouts.lengths.float())
    xi = gather((batch.dense - rollouts.sampled)[mask].exp())
    raw = gather(batch.correction.raw[mask])
    # Rejected tokens have weight 0, kept ones may have any.
    weights = gather(batch.correction.weights[batch.correction.kept])
    by_group = batch.rewards.unflatten(0, (-1, group))
    # torch sorts no more than 2^24 values here; a share of them says the same.
    sample = xi[:: len(xi) // 2**24 + 1]
    quantiles = sample.quantile(torch.tensor([0.01, TAIL, 0.5])).tolist() if len(xi) else [1.0] * 3

    def mean(values: torch.Tensor) -> float:
        return float(values.mean()) if len(values) else 0.0

    return {
        "reward": mean(rewards),
        "accuracy": mean((rewards >= 1.0).float()),
        "groups_without_signal": mean(gather((by_group.amax(1) == by_group.amin(1)).float())),
        "length": mean(lengths),
        "truncated": mean(gather(rollouts.truncated.float())),
        "mismatch/kl_k1": mean(gather(k1(rollouts.sampled, batch.dense)[mask])),
        "mismatch/kl_k3": mean(gather(k3(rollouts.sampled, batch.dense)[mask])),
        "mismatch/xi_p1": quantiles[0],
        "mismatch/xi_p5": quantiles[1],
        "mismatch/xi_p50": quantiles[2],
        "mismatch/lost_rollouts": mean(gather(_lost(batch))),
        "rejected": mean(gather(batch.correction.rejected.float())),
        "masked_tokens": 1.0 - float(gather(batch.counted[mask].float()).mean()),
        "weight/mean_raw": mean(raw),
        "weight/max_raw": float(raw.max()) if len(raw) else 0.0,
        "weight/mean": mean(weights),
        "weight/max": float(weights.max()) if len(weights) else 0.0,
        "effective_sample_size": float(weights.sum() ** 2 / weights.square().sum().clamp(min=1e-12))
        / max(1, len(weights)),
    }


def _lost(batch: Batch) -> torch.Tensor:
    """`[N]`: 1 for a rollout with a token that the dense policy finds 10,000 times less likely."""
    logs = (batch.dense - batch.rollouts.sampled).masked_fill(~batch.rollouts.mask, 0.0)
    return (logs.amin(1) < math.log(LOST)).float()

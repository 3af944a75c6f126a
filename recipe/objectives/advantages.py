"""Advantages of rollouts against the others of their group."""

from __future__ import annotations

import torch

BASELINES = ("mean", "leave_one_out")


def group_advantages(
    rewards: torch.Tensor,
    group: int,
    *,
    baseline: str = "mean",
    divide_by_std: bool = True,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """How much better than its group each rollout did.

    `"mean"` subtracts the group's mean reward (GRPO, https://arxiv.org/abs/2402.03300), by default
    divided by the group's standard deviation; without the division it is that of Dr. GRPO
    (https://arxiv.org/abs/2503.20783). `"leave_one_out"` subtracts the mean of the *other* rollouts
    (RLOO, https://arxiv.org/abs/2402.14740).

    A group in which all rewards are equal has advantage 0 everywhere, exactly; so has one in which
    a reward is no number.

    Args:
        rewards: `[N]`, those of a prompt next to each other.
        group: rollouts of a prompt.
        baseline: `"mean"` or `"leave_one_out"`.
        divide_by_std: whether to divide by the standard deviation over the group (with `group - 1`
            in its denominator).
        kept: `[N]` boolean; the others take no part in mean and deviation and get 0. None: all.

    Returns:
        `[N]` float32.

    Raises:
        ValueError: `group` is below 2 or does not divide `N`, or `baseline` is unknown.
    """
    if group < 2:
        raise ValueError(f"group={group} is too small: an advantage needs at least 2 rollouts.")
    if rewards.dim() != 1 or len(rewards) % group:
        raise ValueError(
            f"rewards has shape {list(rewards.shape)}, which group={group} does not divide."
        )
    if baseline not in BASELINES:
        raise ValueError(f"baseline={baseline!r} is unknown; choose one of {', '.join(BASELINES)}.")
    by_group = rewards.double().unflatten(0, (-1, group))
    counted = torch.ones_like(by_group) if kept is None else kept.unflatten(0, (-1, group)).double()
    # Told by comparison: the rounding of the mean may leave a little of equal rewards.
    highest = by_group.masked_fill(counted == 0, float("-inf")).amax(1, keepdim=True)
    lowest = by_group.masked_fill(counted == 0, float("inf")).amin(1, keepdim=True)
    varied = highest > lowest
    by_group = by_group.masked_fill(counted == 0, 0.0)
    count = counted.sum(1, keepdim=True)
    mean = by_group.sum(1, keepdim=True) / count.clamp(min=1)
    gap = (by_group - mean) * counted
    advantage = gap
    if baseline == "leave_one_out":
        advantage = gap * count / (count - 1).clamp(min=1)
    if divide_by_std:
        deviation = (gap.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        advantage = advantage / (deviation + 1e-4)
    # A reward that is no number says nothing of its whole group.
    varied &= by_group.isfinite().all(1, keepdim=True)
    return torch.where(varied, advantage, 0.0).flatten().float()

"""Online DPO: the best and the worst rollout of each group as a preference."""

from __future__ import annotations

import torch


def preference_pairs(
    rewards: torch.Tensor, group: int, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """The best and the worst rollout of each group that has two different rewards.

    Args:
        rewards: `[N]`, those of a prompt next to each other.
        group: rollouts of a prompt.
        kept: `[N]` boolean, which ones may be paired; None: all.

    Returns:
        `[G, 2]` int64, chosen and rejected; -1 twice for a group without a pair. The first among
        equals is taken.

    Raises:
        ValueError: `group` is below 2 or does not divide `N`.
    """
    if group < 2:
        raise ValueError(f"group={group} is too small: a pair needs at least 2 rollouts.")
    if rewards.dim() != 1 or len(rewards) % group:
        raise ValueError(
            f"rewards has shape {list(rewards.shape)}, which group={group} does not divide."
        )
    by_group = rewards.double().unflatten(0, (-1, group))
    allowed = torch.ones_like(by_group, dtype=torch.bool)
    if kept is not None:
        allowed = kept.unflatten(0, (-1, group))
    best = by_group.masked_fill(~allowed, float("-inf"))
    worst = by_group.masked_fill(~allowed, float("inf"))
    pairs = torch.stack([best.argmax(1), worst.argmin(1)], dim=1)
    first = torch.arange(len(by_group), device=rewards.device)[:, None] * group
    has_pair = allowed.any(1) & (best.amax(1) > worst.amin(1))
    return torch.where(has_pair[:, None], pairs + first, -1)


def preference_loss(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float,
) -> torch.Tensor:
    """`-log sigmoid(beta * (log-ratio of the chosen - log-ratio of the other))` of each pair.

    DPO (https://arxiv.org/abs/2305.18290) on the policy's own rollouts
    (https://arxiv.org/abs/2402.04792), where a rollout's log-ratio is the sum over its tokens of
    `weights * log(p / reference)`: tokens that a correction rejected have weight 0.

    Args:
        logprobs: `[2 G, R]`, chosen and other in turns, with gradients.
        reference: `[2 G, R]`.
        weights: `[2 G, R]`.
        beta: how strongly the policy is held to the reference.

    Returns:
        `[G]` float32.
    """
    # Not by a product alone: where nothing counts there may be no number either.
    gaps = (logprobs.float() - reference.float()).masked_fill(weights == 0, 0.0)
    ratios = (weights * gaps).sum(1)
    chosen, other = ratios[0::2], ratios[1::2]
    return -torch.nn.functional.logsigmoid(beta * (chosen - other))

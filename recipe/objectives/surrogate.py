"""The clipped policy-gradient surrogate."""

from __future__ import annotations

from typing import NamedTuple

import torch

_LARGEST = 20.0
"""Of a log-ratio."""


class Surrogate(NamedTuple):
    """What `clipped_surrogate` returns."""

    loss: torch.Tensor
    """`[N, R]`: to be minimised, per token."""
    clipped: torch.Tensor
    """`[N, R]` boolean: where the clip took the gradient away."""


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Surrogate:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = p / p_old` of each token.

    The ratio is held under e^20, as float32 would overflow, and its gradient ends there. A place
    without a number may be masked out of the result: no gradient comes back from it.

    PPO's surrogate (https://arxiv.org/abs/1707.06347); a larger `clip_high` is DAPO's
    (https://arxiv.org/abs/2503.14476).

    Args:
        logprobs: `[N, R]`, of the learner, with gradients.
        old_logprobs: `[N, R]`, of the policy that the step started from.
        advantages: `[N]`.
        clip_low, clip_high: how far the ratio may fall and rise.
    """
    # The clamp's backward also turns the NaN that exp makes of 0 * inf in a masked place into 0.
    ratio = (logprobs.float() - old_logprobs.float()).clamp(max=_LARGEST).exp()
    advantage = advantages.float()[:, None]
    free = ratio * advantage
    held = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return Surrogate(-torch.minimum(free, held), held < free)

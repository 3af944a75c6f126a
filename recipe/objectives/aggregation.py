"""From losses of tokens to one number, the same however the batch is cut up."""

from __future__ import annotations

from collections.abc import Callable

import torch

AGGREGATIONS = ("sequence", "token", "constant")

Total = Callable[[torch.Tensor], torch.Tensor]
"""Sum of a tensor over all processes."""


def _only_here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def token_coefficients(
    mask: torch.Tensor,
    aggregation: str,
    *,
    longest: int,
    total: Total = _only_here,
) -> torch.Tensor:
    """What to multiply each token's loss with, so that their plain sum is the batch's loss.

    The denominators are those of the whole batch over all processes. So the sum may be taken in
    parts, micro-batch by micro-batch and process by process, in any division, and its gradient is
    the batch's.

    `"sequence"` averages over the tokens of a rollout, then over rollouts (GRPO); `"token"` over
    all tokens (DAPO, https://arxiv.org/abs/2503.14476); `"constant"` divides by rollouts times
    `longest`, whatever their lengths (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Args:
        mask: `[N, R]` boolean: the tokens that count. A rollout without any has left the batch, and
            the denominators too.
        aggregation: one of the three.
        longest: tokens that a completion may have, for `"constant"`.
        total: sums over processes.

    Returns:
        `[N, R]` float32; all 0 if no token counts anywhere.

    Raises:
        ValueError: `aggregation` is unknown, or `longest` is below 1.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation={aggregation!r} is unknown; choose one of {', '.join(AGGREGATIONS)}."
        )
    if longest < 1:
        raise ValueError(f"longest={longest} must be at least 1.")
    counts = mask.float()
    lengths = counts.sum(1, keepdim=True)
    rows = total((lengths > 0).float().sum()).clamp(min=1)
    if aggregation == "sequence":
        return counts / lengths.clamp(min=1) / rows
    if aggregation == "token":
        return counts / total(counts.sum()).clamp(min=1)
    return counts / (rows * longest)

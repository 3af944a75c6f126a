"""From scores to the tokens that stay: deterministic, whatever the scores hold."""

from __future__ import annotations

import torch


def select_kept(
    scores: torch.Tensor, *, keep: int, window: int, sinks: int, positions: torch.Tensor
) -> torch.Tensor:
    """Choose the `keep` tokens of each head that stay.

    The last `window` stored tokens and the tokens at positions below `sinks` always stay. The rest
    are taken by score; among equal scores the more recent token stays; a NaN score counts as the
    lowest, so all-NaN scores keep the most recent tokens.

    Args:
        scores: `[B, H, S]` float32, higher is kept.
        keep: tokens to keep, at least `window` + `sinks`, at most `S`.
        window: most recent tokens that always stay.
        sinks: first tokens of the sequence that always stay.
        positions: `[B, H, S]` integer, ascending along `S`.

    Returns:
        `[B, H, keep]` int64 indices into `S`, ascending, so the kept tokens stay in sequence order.
    """
    largest = torch.finfo(torch.float32).max
    scores = torch.nan_to_num(scores.float(), nan=-largest, posinf=largest, neginf=-largest)
    protected = positions < sinks
    protected[..., scores.shape[-1] - window :] = True
    scores = scores.masked_fill(protected, float("inf"))
    # A stable sort of the reversed tokens breaks ties in favour of the recent, on every device;
    # topk promises no order among equals.
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    return (scores.shape[-1] - 1 - order).sort(dim=-1).values

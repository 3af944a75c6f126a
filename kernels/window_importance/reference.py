"""Window importance in plain torch: float32, one head at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..stored_keys import head_keys


def window_importance(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    stored: int,
    window: int,
    scaling: float,
    normalization: str,
    group_reduction: str,
    key_scales: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """As `kernels.window_importance.window_importance`, whose arguments these are."""
    layers, rows, heads = lengths.shape
    importance = torch.zeros((*lengths.shape, stored), dtype=torch.float32, device=lengths.device)
    group = queries[0].shape[1] // heads
    for layer in range(layers):
        for row in range(rows):
            for head in range(heads):
                length = int(lengths[layer, row, head])
                some_keys = head_keys(
                    keys[layer],
                    order[layer] if order is not None else None,
                    key_scales[layer] if key_scales is not None else None,
                    row,
                    head,
                    length,
                )
                own = queries[layer][row, head * group : (head + 1) * group].float()
                of_head = _older if normalization == "older" else _causal
                scores = of_head(own, some_keys, window, scaling, group_reduction)
                importance[layer, row, head, : scores.shape[0]] = scores
    return importance


def _older(
    queries: torch.Tensor, keys: torch.Tensor, window: int, scaling: float, group_reduction: str
) -> torch.Tensor:
    """`[G, W, D]` and `[n, D]` to `[n - window]`, or to nothing."""
    older = keys[: max(keys.shape[0] - window, 0)]
    if not len(older):
        return keys.new_zeros(0)
    logits = queries @ older.T * scaling
    logits = logits.amax(dim=0) if group_reduction == "max" else logits.mean(dim=0)
    return logits.softmax(dim=-1).mean(dim=0)


def _causal(
    queries: torch.Tensor, keys: torch.Tensor, window: int, scaling: float, group_reduction: str
) -> torch.Tensor:
    """`[G, W, D]` and `[n, D]` to `[n]`."""
    length = keys.shape[0]
    if not length:
        return keys.new_zeros(0)
    # With fewer tokens than queries, the first queries are of no stored token.
    queries = queries[:, -length:]
    index = torch.arange(length, device=keys.device)
    younger = index > index[length - queries.shape[1] :, None]
    logits = (queries @ keys.T * scaling).masked_fill(younger, -torch.inf)
    attention = logits.softmax(dim=-1).mean(dim=1)
    return attention.amax(dim=0) if group_reduction == "max" else attention.mean(dim=0)

"""R-KV's redundancy in plain torch: float32, one head and its whole similarity matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..stored_keys import head_keys


def redundancy(
    keys: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    stored: int,
    similarity_threshold: float,
    key_scales: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """As `kernels.redundancy.redundancy`, whose arguments these are."""
    layers, rows, heads = lengths.shape
    found = torch.zeros((*lengths.shape, stored), dtype=torch.float32, device=lengths.device)
    for layer in range(layers):
        for row in range(rows):
            for head in range(heads):
                length = int(lengths[layer, row, head])
                if not length:
                    continue
                some_keys = head_keys(
                    keys[layer],
                    order[layer] if order is not None else None,
                    key_scales[layer] if key_scales is not None else None,
                    row,
                    head,
                    length,
                )
                found[layer, row, head, :length] = _of_head(some_keys, similarity_threshold)
    return found


def _of_head(keys: torch.Tensor, similarity_threshold: float) -> torch.Tensor:
    """`[n, D]` to `[n]`."""
    directions = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    similarities = directions @ directions.T
    similarities.fill_diagonal_(0)
    index = torch.arange(1, len(keys) + 1, device=keys.device)
    similar = similarities > similarity_threshold
    last = (similar * index).amax(dim=-1, keepdim=True) - 1
    forgiven = (last == index - 1) & similar
    return similarities.masked_fill(forgiven, 0).mean(dim=0).softmax(dim=-1)

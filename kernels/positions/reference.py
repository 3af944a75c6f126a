"""New positions in plain torch, one layer at a time. Integers only: both implementations agree."""

from __future__ import annotations

import torch


def append_positions(
    positions: list[torch.Tensor],
    order: list[torch.Tensor] | None,
    lengths: torch.Tensor,
    placed: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    """See `api.append_positions`."""
    for layer, places in enumerate(positions):
        index = torch.arange(places.shape[2], dtype=torch.int32, device=places.device)
        length = lengths[layer].unsqueeze(-1)
        new = (index >= placed[layer].unsqueeze(-1)) & (index < length)
        places.copy_(torch.where(new, seen[layer].unsqueeze(-1) - length + index, places))
        if order is not None:
            order[layer].copy_(torch.where(new, index, order[layer]))

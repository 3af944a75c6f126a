"""Eviction in plain torch: the truth that the kernels are held to, one layer at a time.

No float arithmetic is involved: both implementations agree exactly.
"""

from __future__ import annotations

import torch

from .types import slot_dtype


def plan_hole_filling(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    window: int,
    sinks: int,
    most_evicted: int,
    most_kept: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `api.plan_hole_filling`; returns sources, targets, moves and kept `[.., most_kept]`."""
    layers = []
    stored = scores.shape[3]
    for layer in range(scores.shape[0]):
        length, limit = lengths[layer].unsqueeze(-1), keep[layer].unsqueeze(-1)
        slots, places = order[layer][..., :stored], positions[layer][..., :stored]
        chosen = _chosen(scores[layer], places, length, limit, window, sinks)
        valid = torch.arange(stored, device=scores.device) < length
        hole = valid & ~chosen & (slots < limit)
        mover = chosen & (slots >= limit)
        sources = _listed(slots, mover, most_evicted, -1)
        targets = _listed(slots, hole, most_evicted, -1)

        # The i-th oldest survivor beyond the limit takes the slot of the i-th oldest evicted token.
        all_targets = _listed(slots, hole, stored, -1)
        taken = all_targets.gather(-1, (mover.cumsum(-1) - 1).clamp_min(0))
        new_slots = torch.where(mover, taken, slots)
        kept = _kept(chosen, most_kept)
        survivors = torch.arange(stored, device=scores.device) < chosen.sum(-1, keepdim=True)
        for target, source in ((slots, new_slots), (places, places)):
            target.copy_(torch.where(survivors, _listed(source, chosen, stored, -1), target))
        pairs = (each.to(slot_dtype(stored)) for each in (sources, targets))
        layers.append((*pairs, mover.sum(-1, dtype=torch.int32), kept))
    sources, targets, moves, kept = (torch.stack(each) for each in zip(*layers, strict=True))
    return sources, targets, moves, kept


def plan_compaction(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    window: int,
    sinks: int,
    most_kept: int,
) -> torch.Tensor:
    """See `api.plan_compaction`."""
    stored = scores.shape[3]
    layers = []
    for layer in range(scores.shape[0]):
        length, limit = lengths[layer].unsqueeze(-1), keep[layer].unsqueeze(-1)
        places = positions[layer][..., :stored]
        chosen = _chosen(scores[layer], places, length, limit, window, sinks)
        layers.append(_kept(chosen, most_kept))
    return torch.stack(layers)


def fill_holes(
    tensors: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor, moves: torch.Tensor
) -> None:
    """See `api.fill_holes`."""
    index = torch.arange(sources.shape[3], device=sources.device)
    for layer, tensor in enumerate(tensors):
        row, head, move = torch.nonzero(index < moves[layer].unsqueeze(-1), as_tuple=True)
        source, target = sources[layer][row, head, move], targets[layer][row, head, move]
        tensor[row, head, target.long()] = tensor[row, head, source.long()]


def compact(tensors: list[torch.Tensor], kept: torch.Tensor, keep: torch.Tensor) -> None:
    """See `api.compact`; this is the exact gather-and-copy, with a copy of each layer's tokens."""
    index = torch.arange(kept.shape[3], device=kept.device)
    for layer, tensor in enumerate(tensors):
        moved = (index < keep[layer].unsqueeze(-1)) & (index < tensor.shape[2])
        row, head, slot = torch.nonzero(moved, as_tuple=True)
        tensor[row, head, slot] = tensor[row, head, kept[layer][row, head, slot].long()]


def _chosen(
    scores: torch.Tensor,
    positions: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    window: int,
    sinks: int,
) -> torch.Tensor:
    """Which tokens `[B, H, S]` stay: all of a head that holds at most `limit` of them."""
    stored = scores.shape[-1]
    index = torch.arange(stored, device=scores.device)
    largest = torch.finfo(torch.float32).max
    scores = torch.nan_to_num(scores, nan=-largest, posinf=largest, neginf=-largest)
    scores = scores.masked_fill((positions < sinks) | (index >= length - window), float("inf"))
    scores = scores.masked_fill(index >= length, -float("inf"))
    # A stable sort of the reversed tokens breaks ties in favour of the recent.
    best = stored - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return best.argsort(dim=-1) < torch.minimum(length, limit)


def _kept(chosen: torch.Tensor, most_kept: int) -> torch.Tensor:
    """Indices `[B, H, most_kept]` int32 of the chosen tokens, ascending."""
    index = torch.arange(chosen.shape[-1], device=chosen.device, dtype=torch.int32)
    kept = _listed(index.expand(chosen.shape), chosen, most_kept, -1)
    return torch.where(kept < 0, index[:most_kept], kept)


def _listed(values: torch.Tensor, wanted: torch.Tensor, size: int, rest: int) -> torch.Tensor:
    """The `wanted` values along the last dimension in their order, in the first of `size` places.

    Places left over hold `rest`; values that find no place are dropped.
    """
    place = torch.where(wanted, wanted.cumsum(-1) - 1, size).clamp_max(size)
    listed = values.new_full((*values.shape[:-1], size + 1), rest)
    return listed.scatter(-1, place, values)[..., :size]

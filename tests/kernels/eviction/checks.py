"""What must hold after an eviction, head by head, from `select_kept` alone."""

from __future__ import annotations

import torch

from sparse_cache.kernels.eviction import (
    HoleFilling,
    compact,
    fill_holes,
    plan_compaction,
    plan_hole_filling,
)
from sparse_cache.selection import select_kept
from tests.kernels.eviction.inputs import Layers


def evict(
    layers: Layers, keep: torch.Tensor, *, window: int, sinks: int, implementation: str
) -> HoleFilling:
    """Evict by hole filling, in place, and check everything about it."""
    before = layers.clone()
    evicted = int((layers.lengths - keep).clamp_min(0).max())
    plan = plan_hole_filling(
        layers.scores,
        layers.positions,
        layers.order,
        layers.lengths,
        keep,
        window=window,
        sinks=sinks,
        most_evicted=evicted,
        most_kept=int(torch.minimum(layers.lengths, keep).max()),
        record=True,
        implementation=implementation,
    )
    fill_holes(layers.keys, plan, implementation=implementation)
    check_fill(before, layers, plan, keep, window=window, sinks=sinks)
    return plan


def survivors(
    layers: Layers, keep: torch.Tensor, at: tuple[int, int, int], window: int, sinks: int
) -> torch.Tensor:
    """Indices in the sequence of the tokens of one head that must stay."""
    layer, row, head = at
    length = int(layers.lengths[at])
    if int(keep[at]) >= length:
        return torch.arange(length, device=layers.scores.device)
    return select_kept(
        layers.scores[at][:length],
        keep=int(keep[at]),
        window=window,
        sinks=sinks,
        positions=layers.positions[layer][row, head, :length],
    )


def check_fill(
    before: Layers, after: Layers, plan: HoleFilling, keep: torch.Tensor, *, window: int, sinks: int
) -> None:
    """Check a plan with its record, and layers in which it was carried out."""
    assert plan.kept is not None
    for at in _heads(before):
        layer, row, head = at
        length, moves = int(before.lengths[at]), int(plan.moves[at])
        wanted = survivors(before, keep, at, window, sinks)
        left = len(wanted)
        kept, own = plan.kept[at], torch.arange(plan.kept.shape[-1], device=keep.device)
        assert torch.equal(kept[:left].long(), wanted)
        assert torch.equal(kept[left:].long(), own[left:])
        old_places, old_slots = (
            each[layer][row, head] for each in (before.positions, before.order)
        )
        places, slots = (each[layer][row, head] for each in (after.positions, after.order))
        assert torch.equal(places[:left], old_places[wanted])
        assert torch.equal(places[length:], old_places[length:])
        assert torch.equal(slots[length:], old_slots[length:])
        # The survivors fill the first slots, and those that were there have not moved.
        assert torch.equal(slots[:left].sort().values.long(), own[:left])
        stays = old_slots[wanted] < left
        assert torch.equal(slots[:left][stays], old_slots[wanted][stays])
        assert moves == int((~stays).sum())
        sources, targets = plan.sources[at], plan.targets[at]
        assert bool((sources[:moves] >= left).all() and (sources[:moves] < length).all())
        assert bool((targets[:moves] >= 0).all() and (targets[:moves] < left).all())
        assert bool((sources[moves:] == -1).all() and (targets[moves:] == -1).all())
        # Every survivor's row is found through its new slot, bit by bit; nothing else is touched.
        old_rows, rows = before.keys[layer][row, head], after.keys[layer][row, head]
        assert same_bits(rows[slots[:left].long()], old_rows[old_slots[wanted].long()])
        untouched = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        untouched[targets[:moves].long()] = False
        assert same_bits(rows[untouched], old_rows[untouched])


def compact_and_check(
    layers: Layers, keep: torch.Tensor, *, window: int, sinks: int, implementation: str
) -> torch.Tensor:
    """Evict from layers in the order of the sequence, in place, and check everything about it."""
    before = layers.clone()
    kept = plan_compaction(
        layers.scores,
        layers.positions,
        layers.lengths,
        keep,
        window=window,
        sinks=sinks,
        most_kept=int(torch.minimum(layers.lengths, keep).max()),
        implementation=implementation,
    )
    assert all(map(torch.equal, layers.positions, before.positions))
    compact(layers.keys, kept, keep, implementation=implementation)
    compact(layers.positions, kept, keep, implementation=implementation)
    for at in _heads(before):
        layer, row, head = at
        wanted = survivors(before, keep, at, window, sinks)
        left = len(wanted)
        assert torch.equal(kept[at][:left].long(), wanted)
        assert kept[at][left:].tolist() == list(range(left, kept.shape[-1]))
        for new, old in ((layers.keys, before.keys), (layers.positions, before.positions)):
            rows, old_rows = new[layer][row, head], old[layer][row, head]
            assert same_bits(rows[:left], old_rows[wanted])
            assert same_bits(rows[left:], old_rows[left:])
    return kept


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _heads(layers: Layers) -> list[tuple[int, int, int]]:
    count, rows, heads = layers.lengths.shape
    return [(i, j, k) for i in range(count) for j in range(rows) for k in range(heads)]

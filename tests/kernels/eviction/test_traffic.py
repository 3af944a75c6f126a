"""Bytes of an eviction, counted from plans."""

from __future__ import annotations

import pytest
import torch

from sparse_cache.kernels.eviction import plan_compaction, plan_hole_filling
from sparse_cache.kernels.eviction.traffic import (
    compaction_traffic,
    gather_and_copy_traffic,
    hole_filling_traffic,
)
from tests.kernels.eviction.inputs import DEVICE, make_layers, per_head


def test_small_example_by_hand() -> None:
    """Of six tokens, those at 1 and 2 leave: 5 and 4 fill their slots."""
    layers = make_layers(torch.full((1, 1, 1), 6), 6, shuffled=False)
    layers.scores[0, 0, 0] = torch.tensor([3.0, 1.0, 1.0, 3.0, 3.0, 3.0], device=DEVICE)
    keep = per_head(4, (1, 1, 1))
    given = (layers.lengths, keep)
    options = {"stored": 6, "row_bytes": (16, 8)}
    kept = plan_compaction(layers.scores, layers.positions, *given, window=1, sinks=0, most_kept=4)
    plan = plan_hole_filling(
        layers.scores, layers.positions, layers.order, *given, window=1, sinks=0, most_evicted=2
    )
    assert kept.flatten().tolist() == [0, 3, 4, 5]
    filled = hole_filling_traffic(plan, *given, **options)
    assert filled.rows == 2 * 2 * 24
    # 6 scores, positions and slots; a length and a limit; two pairs and their number, twice.
    assert filled.read == 2 * 24 + 6 * 12 + 8 + 2 * (2 * 4 + 4)
    # 4 positions and slots; the plan.
    assert filled.written == 2 * 24 + 4 * 8 + 2 * 4 + 4
    assert filled.transient == 6 * 4 + 2 * 4 + 4
    moved = compaction_traffic(kept, *given, **options)
    assert moved.rows == 2 * 3 * 28
    assert moved.transient == 6 * 4 + 4 * 4
    gathered = gather_and_copy_traffic(*given, **options)
    assert gathered.rows == 4 * 4 * 28
    assert gathered.transient == 4 * (16 + 8) + 6 * 4


def test_heads_that_keep_all_move_nothing() -> None:
    layers = make_layers(torch.tensor([[[6, 3]]]), 6)
    keep = per_head(6, (1, 1, 2))
    plan = plan_hole_filling(
        layers.scores,
        layers.positions,
        layers.order,
        layers.lengths,
        keep,
        window=1,
        sinks=0,
        most_evicted=0,
    )
    options = {"stored": 6, "row_bytes": (16,)}
    assert hole_filling_traffic(plan, layers.lengths, keep, **options).rows == 0
    assert gather_and_copy_traffic(layers.lengths, keep, **options).moved == 0


@pytest.mark.parametrize("scores", ["random", "oldest leave"])
def test_holes_are_a_quarter_of_gathering(scores: str) -> None:
    """At budget 512 + 128 with heads of 128 in 16 bit, whatever leaves; transient under 1 %."""
    shape, budget, interval = (2, 2, 8), 512, 128
    stored = budget + interval
    row_bytes = (256, 256)
    random = torch.Generator().manual_seed(0)
    made = (
        torch.rand((*shape, stored), generator=random)
        if scores == "random"
        else torch.arange(stored).float().expand(*shape, stored).contiguous()
    )
    index = torch.arange(stored, dtype=torch.int32, device=DEVICE)
    places = [index.expand(*shape[1:], stored).clone() for _ in range(2 * shape[0])]
    lengths, keep = per_head(stored, shape), per_head(budget, shape)
    plan = plan_hole_filling(
        made.to(DEVICE),
        places[:2],
        places[2:],
        lengths,
        keep,
        window=8,
        sinks=4,
        most_evicted=interval,
    )
    options = {"stored": stored, "row_bytes": row_bytes}
    filled = hole_filling_traffic(plan, lengths, keep, **options)
    gathered = gather_and_copy_traffic(lengths, keep, **options)
    cache = lengths.numel() * stored * sum(row_bytes)
    assert filled.moved <= gathered.moved / 4
    assert filled.transient < cache / 100

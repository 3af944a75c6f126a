"""Which tokens stay and where their rows go, against `select_kept` for every head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.kernels.eviction import fill_holes, plan_hole_filling
from sparse_cache.kernels.launch import counted_launches
from tests.kernels.eviction.checks import compact_and_check, evict, same_bits
from tests.kernels.eviction.inputs import (
    DEVICE,
    IMPLEMENTATIONS,
    POISON,
    Layers,
    make_layers,
    per_head,
    random_lengths,
)

EXAMPLES = {"reference": 60, "triton": 6}
"""The interpreter is slow."""

DTYPES = (torch.float32, torch.float16, torch.int8) + (
    (torch.bfloat16,) if DEVICE == "cuda" else ()
)


def both_ways(
    layers: Layers, keep: torch.Tensor, *, window: int, sinks: int, implementation: str
) -> None:
    """Hole filling on a copy; compaction too, which needs slots in the order of the sequence."""
    options = {"window": window, "sinks": sinks, "implementation": implementation}
    evict(layers.clone(), keep, **options)
    compact_and_check(layers.clone(), keep, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_heads_with_ties(implementation: str) -> None:
    @settings(deadline=None, max_examples=EXAMPLES[implementation], derandomize=True)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        window, sinks = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
        stored = data.draw(st.integers(1, 40))
        shape = (2, 1, 2)
        lengths = random_lengths(shape, stored, data.draw(st.integers(0, 99)))
        layers = make_layers(
            lengths,
            stored,
            values=data.draw(st.sampled_from([1, 2, 5, 1000])),
            seed=data.draw(st.integers(0, 99)),
        )
        keep = torch.tensor(
            [data.draw(st.integers(window + sinks, 44)) for _ in range(4)],
            dtype=torch.int32,
            device=DEVICE,
        ).view(shape)
        both_ways(layers, keep, window=window, sinks=sinks, implementation=implementation)

    check()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["equal", "nan", "infinite", "zeros", "mixed", "tiny"])
def test_scores_that_are_hard_to_order(kind: str, implementation: str) -> None:
    stored, shape = 23, (1, 1, 2)
    layers = make_layers(torch.tensor([[[23, 17]]]), stored)
    hard = {
        "equal": [2.5],
        "nan": [float("nan")],
        "infinite": [float("inf"), -float("inf"), 0.0],
        "zeros": [0.0, -0.0],
        "mixed": [float("nan"), -3.4e38, float("inf"), 3.4028234663852886e38, -float("inf"), 1e-3],
        "tiny": [1e-45, -1e-45, 0.0, 1e-38, -1e-38],
    }[kind]
    layers.scores[..., :17] = torch.tensor((hard * stored)[:17], device=DEVICE)
    layers.scores[0, 0, 0, 17:] = torch.tensor((hard * stored)[17:23], device=DEVICE)
    both_ways(layers, per_head(9, shape), window=2, sinks=2, implementation=implementation)


def test_sign_of_nan_does_not_matter() -> None:
    layers = make_layers(torch.full((1, 1, 1), 12), 12, values=1000)
    layers.scores[0, 0, 0, 3], layers.scores[0, 0, 0, 5] = float("nan"), -float("nan")
    bits = layers.scores.view(torch.int32)
    bits[0, 0, 0, 5] |= -(2**31)
    keep = per_head(10, (1, 1, 1))
    plan = evict(layers, keep, window=1, sinks=0, implementation="triton")
    assert plan.kept is not None
    assert not {3, 5} & set(plan.kept.view(-1).tolist())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("window", "sinks", "keep"),
    [
        (1, 0, 1),  # all that can go goes, and one token stays
        (3, 2, 5),  # only protected tokens stay
        (1, 0, 18),  # one token goes
        (1, 0, 19),  # nothing goes
        (1, 0, 100),
        (4, 100, 104),  # sinks and window protect everything
    ],
)
def test_how_much_goes(window: int, sinks: int, keep: int, implementation: str) -> None:
    layers = make_layers(torch.tensor([[[19, 1]]]), 19)
    both_ways(
        layers,
        per_head(keep, (1, 1, 2)),
        window=window,
        sinks=sinks,
        implementation=implementation,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_and_heads_with_limits_of_their_own(implementation: str) -> None:
    """Ragged lengths and limits; slots far apart; heads of several tiles."""
    shape = (2, 2, 2)
    keep = per_head([[[5, 9], [40, 12]], [[20, 6], [7, 33]]], shape)
    layers = make_layers(random_lengths(shape, 33, seed=3), 33, seed=4)
    both_ways(layers, keep, window=3, sinks=1, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("keep", [290, 300])
def test_more_tokens_than_one_tile(keep: int, implementation: str) -> None:
    layers = make_layers(torch.full((1, 1, 1), 611), 611, values=3, spare=0)
    both_ways(layers, per_head(keep, (1, 1, 1)), window=8, sinks=4, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_expanded_lengths_and_strided_scores(implementation: str) -> None:
    shape = (2, 1, 2)
    layers = make_layers(torch.full(shape, 21), 21)
    layers.lengths = per_head(21, shape)
    wide = torch.full((2, 1, 2, 31), float("nan"), device=DEVICE)
    wide[..., 5:26] = layers.scores
    layers.scores = wide[..., 5:26]
    assert layers.lengths.stride() == (0, 0, 0)
    options = {"window": 2, "sinks": 1, "implementation": implementation}
    evict(layers, per_head(11, shape), **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 16, 80])
def test_rows_of_any_size(size: int, dtype: torch.dtype, implementation: str) -> None:
    layers = make_layers(torch.tensor([[[19, 7]]]), 19, size=size, dtype=dtype)
    both_ways(layers, per_head(8, (1, 1, 2)), window=1, sinks=0, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_number_a_token(implementation: str) -> None:
    """Mass and scales `[B, H, C]` move by the same plan."""
    layers = make_layers(torch.full((2, 1, 2), 15), 15, size=1)
    layers.keys = [each[..., 0].clone() for each in layers.keys]
    both_ways(layers, per_head(6, (2, 1, 2)), window=1, sinks=0, implementation=implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_rows_that_are_not_aligned(offset: int, implementation: str) -> None:
    """Views into wider rows, at any address."""
    layers = make_layers(torch.full((1, 1, 2), 15), 15, size=16, dtype=torch.int8)
    wide = torch.zeros(1, 2, layers.keys[0].shape[2], 32, dtype=torch.int8, device=DEVICE)
    view = wide[..., offset : offset + 16]
    view.copy_(layers.keys[0])
    layers.keys = [view]
    plan = evict(layers, per_head(6, (1, 1, 2)), window=1, sinks=0, implementation=implementation)
    assert int(plan.moves.sum()) > 0
    assert not wide[..., :offset].any() and not wide[..., offset + 16 :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_evictions_with_tokens_between(implementation: str) -> None:
    """Slots and positions stay consistent however often tokens were evicted and appended."""
    shape, keep, interval = (2, 1, 2), 9, 4
    layers = make_layers(torch.full(shape, keep + interval), keep + interval, spare=0, values=1000)
    seen = int(max(each[..., : keep + interval].max() for each in layers.positions)) + 1
    random = torch.Generator().manual_seed(9)
    for _ in range(5 if implementation == "reference" else 3):
        # A token's row says which position it is for, so that mixed-up rows show.
        for places, slots, keys in zip(layers.positions, layers.order, layers.keys, strict=True):
            here = slots[..., : keep + interval].long()
            tokens = places[..., : keep + interval].float()
            keys[..., 0].scatter_(2, here, tokens)
        evict(layers, per_head(keep, shape), window=2, sinks=1, implementation=implementation)
        for places, slots, keys in zip(layers.positions, layers.order, layers.keys, strict=True):
            here = slots[..., :keep].long()
            assert torch.equal(keys[..., 0].gather(2, here), places[..., :keep].float())
            assert bool((places[..., 1:keep] > places[..., : keep - 1]).all())
            new = torch.arange(interval, dtype=torch.int32, device=DEVICE)
            slots[..., keep : keep + interval] = keep + new
            places[..., keep : keep + interval] = seen + new
        seen += interval
        layers.scores = torch.rand(layers.scores.shape, generator=random).to(DEVICE)


def test_implementations_make_the_same_plan() -> None:
    made = []
    for implementation in IMPLEMENTATIONS:
        layers = make_layers(random_lengths((1, 2, 2), 29, seed=1), 29, seed=2)
        keep = per_head(11, (1, 2, 2))
        made.append(evict(layers, keep, window=2, sinks=2, implementation=implementation))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_record_and_with_room(implementation: str) -> None:
    """Counts larger than needed are cut to S; nothing is recorded unless asked."""
    layers = make_layers(torch.full((1, 1, 1), 13), 13)
    before = layers.keys[0].clone()
    plan = plan_hole_filling(
        layers.scores,
        layers.positions,
        layers.order,
        layers.lengths,
        per_head(13, (1, 1, 1)),
        window=1,
        sinks=0,
        most_evicted=50,
        implementation=implementation,
    )
    assert plan.kept is None
    assert plan.sources.shape[-1] == 13
    assert int(plan.moves) == 0 and bool((plan.sources == -1).all())
    fill_holes(layers.keys, plan, implementation=implementation)
    assert same_bits(layers.keys[0], before)


def test_one_launch_for_all_layers() -> None:
    layers = make_layers(torch.full((3, 1, 1), 9), 9)
    with counted_launches() as names:
        evict(layers.clone(), per_head(5, (3, 1, 1)), window=1, sinks=0, implementation="triton")
        assert names == ["plan_hole_filling_kernel", "fill_holes_kernel"]
    with counted_launches() as names:
        compact_and_check(
            layers, per_head(5, (3, 1, 1)), window=1, sinks=0, implementation="triton"
        )
        assert names == ["plan_compaction_kernel", "compact_kernel", "compact_kernel"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_stored(implementation: str) -> None:
    """Empty heads, empty batches and empty plans are no trouble."""
    layers = make_layers(torch.tensor([[[0, 6]]]), 6)
    evict(layers, per_head(4, (1, 1, 2)), window=1, sinks=0, implementation=implementation)
    empty = make_layers(torch.zeros(1, 0, 2, dtype=torch.int64), 6)
    plan = plan_hole_filling(
        empty.scores,
        empty.positions,
        empty.order,
        empty.lengths,
        per_head(4, (1, 0, 2)),
        window=1,
        sinks=0,
        most_evicted=2,
        implementation=implementation,
    )
    fill_holes(empty.keys, plan, implementation=implementation)
    assert plan.moves.shape == (1, 0, 2)


def test_poison_is_poison() -> None:
    """The tests above would notice a position or a slot read beyond the length."""
    layers = make_layers(torch.full((1, 1, 1), 4), 6)
    assert layers.positions[0].flatten()[-1] == -POISON  # would count as a sink
    assert layers.order[0].flatten()[-1] == POISON  # would be a mover
    assert bool(layers.scores[0, 0, 0, 4:].isnan().all())

"""The Triton kernels against the `[T, T]` matrix in float64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from sparse_cache.kernels.launch import counted_launches
from sparse_cache.kernels.replay_attention import replay_attention
from sparse_cache.kernels.replay_attention.tiles import key_tiles, query_blocks

from .schedules import batch_of, causal_deaths, evicting_deaths
from .test_replay_attention import Case, random_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes products of bfloat16 wrongly.
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * (DEVICE == "cuda")


def evicting_case(length: int = 150, *, alike: bool = False, **options: object) -> Case:
    """Two rows of different padding, with heads that keep different numbers of tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        evicting_deaths(
            1 if alike else 2,
            length,
            budget=30,
            interval=20,
            prompt=40,
            padding=padding,
            ragged=True,
            generator=generator,
        )
        for padding in (0, 13)
    ]
    return random_case(batch_of(rows), heads=2, **({"size": 16, "value_size": 16} | options))


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    case.tensors = [tensor.to(dtype) for tensor in case.tensors]
    truth = case.run(torch.float64, "reference")
    case.tensors = [tensor.to(DEVICE) for tensor in case.tensors]
    case.deaths, case.grad = case.deaths.to(DEVICE), case.grad.to(DEVICE)
    if case.options["sinks"] is not None:
        case.options["sinks"] = case.options["sinks"].to(DEVICE)
    found = case.run(dtype, "triton")
    # Weights, and their gradients, are rounded to the dtype before the second product.
    tolerance = 1e-5 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps
    scale = max(float(theirs.norm()) for theirs in truth[1:])
    for mine, theirs in zip(found, truth, strict=True):
        assert mine.dtype == dtype and torch.isfinite(mine).all()
        error = (mine.cpu().double() - theirs).norm()
        assert error <= tolerance * theirs.norm() + 1e-6 * scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_evictions(dtype: torch.dtype) -> None:
    check(evicting_case(), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": True},
        {"softcap": 2.0, "size": 20, "value_size": 33},
        {"alike": True, "group": 3, "size": 4, "value_size": 8},
        {"length": 81, "group": 1},
    ],
)
def test_features_and_shapes(options: dict[str, object]) -> None:
    check(evicting_case(**options))


@pytest.mark.parametrize("length", [1, 65])
def test_nothing_dies(length: int) -> None:
    check(random_case(causal_deaths(1, 2, length), heads=2, size=16, value_size=16))


def test_padding_neither_sees_nor_is_seen() -> None:
    deaths = causal_deaths(2, 1, 90)
    deaths[0, :, :20] = deaths[0, :, 50:60] = deaths[1] = 0
    case = random_case(deaths, heads=1, size=16, value_size=16)
    clean = [tensor.cpu() for tensor in case.run(torch.float32, "torch")]
    padding = deaths[:, 0] == 0
    for tensor in case.tensors:
        tensor.masked_fill_(padding[:, None, :, None], float("nan"))
    case.tensors = [tensor.to(DEVICE) for tensor in case.tensors]
    case.deaths, case.grad = deaths.to(DEVICE), case.grad.to(DEVICE)
    for mine, theirs in zip(case.run(torch.float32, "triton"), clean, strict=True):
        assert torch.allclose(mine.cpu(), theirs, atol=1e-5)


def test_same_bits_and_three_launches() -> None:
    case = evicting_case(length=90)
    case.tensors = [tensor.to(DEVICE) for tensor in case.tensors]
    case.deaths, case.grad = case.deaths.to(DEVICE), case.grad.to(DEVICE)
    with counted_launches() as names:
        first = case.run(torch.float32, "triton")
    assert names == ["attend", "differentiate_queries", "differentiate_keys"]
    for one, other in zip(first, case.run(torch.float32, "triton"), strict=True):
        assert torch.equal(one, other)


def test_blocks_list_the_living() -> None:
    """Every block's keys are those alive at its first query; a prompt needs no list."""
    case = evicting_case(length=400)
    plan = query_blocks(case.deaths)
    covered = torch.zeros(2, 400, dtype=torch.int)
    for index, (row, start, stop, first) in enumerate(plan.blocks.tolist()):
        covered[row, start:stop] += 1
        for head in range(2):
            count, begin = int(plan.counts[index, head]), int(plan.starts[index, head])
            alive = case.deaths[row, head] > start
            alive[start:] = False
            expected = alive.nonzero()[:, 0].tolist()
            if first >= 0:
                assert list(range(first, first + count)) == expected
            else:
                assert plan.columns[begin : begin + count].tolist() == expected
    assert torch.equal(covered.bool(), case.deaths[:, 0] > 0) and covered.max() == 1
    assert (plan.blocks[:, 3] >= 0).any() and (plan.blocks[:, 3] < 0).any()


def test_tiles_hold_every_key_once() -> None:
    deaths = evicting_case(length=150).deaths
    tiles = key_tiles(deaths, 32)
    assert tiles.columns.shape == (2, 2, 160)
    for row in range(2):
        for head in range(2):
            columns = tiles.columns[row, head]
            assert sorted(columns[columns < 150].tolist()) == list(range(150))
            for tile, (begin, end) in zip(
                columns.split(32), tiles.spans[row, head].tolist(), strict=True
            ):
                seen = [c for c in tile.tolist() if c < 150 and deaths[row, head, c] > 0]
                last = max((min(int(deaths[row, head, c]), 150) for c in seen), default=0)
                assert end == last and (not seen or begin == min(seen))


def test_what_is_not_served() -> None:
    case = evicting_case(length=20)
    with pytest.raises(RuntimeError, match="float64 are not served"):
        case.run(torch.float64, "triton")
    wide = torch.zeros(1, 1, 3, 257)
    with pytest.raises(RuntimeError, match="larger than 256"):
        replay_attention(
            wide, wide, wide, causal_deaths(1, 1, 3), scaling=1.0, implementation="triton"
        )

"""Redundancy: the kernels against float64, and the reference against the policy."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.kernels.launch import counted_launches
from sparse_cache.kernels.redundancy import redundancy
from sparse_cache.kernels.redundancy.api import _redundancy
from sparse_cache.policies.rkv import RKVPolicy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@dataclass
class Inputs:
    """What `redundancy` takes, by layer."""

    keys: list[torch.Tensor]
    order: list[torch.Tensor] | None
    lengths: torch.Tensor
    stored: int
    key_scales: list[torch.Tensor] | None = None

    def run(self, implementation: str = "triton", similarity_threshold: float = 0.5) -> Any:
        return redundancy(
            self.keys,
            self.order,
            self.lengths,
            self.stored,
            similarity_threshold=similarity_threshold,
            key_scales=self.key_scales,
            implementation=implementation,
        )


def make_inputs(
    lengths: Sequence[Sequence[Sequence[int]]],
    *,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    ordered: bool = True,
    shift: float = 0.9,
    seed: int = 0,
) -> Inputs:
    """Random keys; keys, scales and order beyond a length are poison.

    With a `shift` of about 0.9, cosines lie on both sides of 0.5.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths, dtype=torch.int32)
    layers, rows, heads = counts.shape
    stored = int(counts.max())
    made = Inputs([], [] if ordered else None, counts.to(DEVICE), stored)
    if dtype == torch.int8:
        made.key_scales = []
    for layer in range(layers):
        capacity = stored + 3 * layer
        keys = torch.randn(rows, heads, capacity, size, generator=generator) + shift
        order = torch.full((rows, heads, capacity), 2**30, dtype=torch.int32)
        scales = torch.full((rows, heads, capacity), torch.nan)
        if dtype == torch.int8:
            scales = keys.abs().amax(dim=-1) / 127
            keys = (keys / scales.unsqueeze(-1)).round()
        keys = keys.to(dtype)
        for row in range(rows):
            for head in range(heads):
                length = int(counts[layer, row, head])
                order[row, head, :length] = torch.randperm(length, generator=generator)
                keys[row, head, length:] = 127 if dtype == torch.int8 else torch.nan
                scales[row, head, length:] = torch.nan
        made.keys.append(keys.to(DEVICE))
        if made.order is not None:
            made.order.append(order.to(DEVICE))
        if made.key_scales is not None:
            made.key_scales.append(scales.to(DEVICE))
    return made


def cosines_of(made: Inputs, row: tuple[int, int, int]) -> torch.Tensor:
    """Cosines between the keys of one head in float64, diagonal cleared."""
    layer, batch, head = row
    length = int(made.lengths[row])
    slots = torch.arange(length, device=DEVICE)
    if made.order is not None:
        slots = made.order[layer][batch, head, :length].long()
    keys = made.keys[layer][batch, head, slots].double().cpu()
    if made.key_scales is not None:
        keys *= made.key_scales[layer][batch, head, slots].double().cpu().unsqueeze(-1)
    directions = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    return (directions @ directions.T).fill_diagonal_(0)


def truth(cosines: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Redundancy of one head in float64, and its allowed relative error."""
    length = len(cosines)
    cosines = cosines.clone()
    forgiven = torch.zeros(length)
    for i in range(length):
        similar = (cosines[i] > threshold).nonzero()
        if len(similar):
            cosines[i, similar[-1]] = 0
            forgiven[similar[-1]] += 1
    # As the kernel states: units of fixed point, and float32.
    unit = 2.0 ** -(29 - math.floor(math.log2(length)))
    error = (forgiven + 1) * unit / length + 4e-6
    return cosines.mean(dim=0).softmax(dim=-1), error + error.max()


def check(made: Inputs, threshold: float = 0.5) -> None:
    """Both implementations within the bound that the kernels state.

    The threshold is moved into the widest gap between cosines near it: a cosine that equals it up
    to rounding may fall on either side.
    """
    rows = [tuple(row) for row in torch.cartesian_prod(*map(torch.arange, made.lengths.shape))]
    cosines = {row: cosines_of(made, row) for row in rows}
    near = torch.cat([each.flatten() for each in cosines.values()])
    near = near[(near - threshold).abs() < 0.02]
    ends = torch.tensor([threshold - 0.02, threshold + 0.02], dtype=near.dtype)
    near = torch.cat([near, ends]).sort().values
    widest = int(near.diff().argmax())
    assert near.diff()[widest] > 1e-5
    threshold = float(near[widest] + near[widest + 1]) / 2
    results = [made.run(each, threshold) for each in ("triton", "reference")]
    for row in rows:
        expected, allowed = truth(cosines[row], threshold)
        for result in results:
            found = result[row].double().cpu()
            assert not found[len(expected) :].any()
            error = (found[: len(expected)] / expected - 1).abs()
            assert (error <= allowed).all(), error.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_ragged_heads_of_all_layers_in_three_launches(size: int, dtype: torch.dtype) -> None:
    made = make_inputs([[[1, 67]], [[34, 5]]], size=size, dtype=dtype)
    with counted_launches() as names:
        check(made)
    assert names == ["directions_kernel", "totals_kernel", "softmax_kernel"]


@pytest.mark.parametrize("size", [64, 80, 256])
def test_int8_keys(size: int) -> None:
    check(make_inputs([[[66, 9]]], size=size, dtype=torch.int8))


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)))
    lengths = torch.tensor(
        data.draw(st.lists(st.integers(1, 80), min_size=8, max_size=8)), dtype=torch.int32
    )[: math.prod(shape)].view(shape)
    made = make_inputs(
        lengths.tolist(),
        size=data.draw(st.sampled_from([8, 20, 33])),
        dtype=data.draw(st.sampled_from([*DTYPES, torch.int8])),
        ordered=data.draw(st.booleans()),
        shift=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
        seed=data.draw(st.integers(0, 99)),
    )
    check(made, data.draw(st.sampled_from([-0.2, 0.05, 0.31, 0.5, 0.77])))


def test_the_last_similar_key_is_far_away() -> None:
    """Only key 3 resembles the others, so that every tile has to be looked at."""
    made = make_inputs([[[150]]], size=256, shift=0.0, ordered=False)
    made.keys[0][0, 0, 3] = made.keys[0][0, 0].mean(dim=0)
    check(made, 0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_similar_key_in_any_row(dtype: torch.dtype) -> None:
    made = make_inputs([[[65, 64]]], size=128, dtype=dtype)
    # One corner of a cross-polytope each: all cosines are 0 or -1.
    corners = torch.eye(128)[:65]
    corners[33:] = -corners[:32]
    made.keys = [corners.to(dtype).expand(1, 2, 65, 128).contiguous().to(DEVICE)]
    check(made)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_everything_identical(dtype: torch.dtype) -> None:
    made = make_inputs([[[70, 3]]], dtype=dtype)
    for keys in made.keys:
        keys.copy_(keys[:, :, :1])
    check(made)


def test_all_similar_below_every_cosine() -> None:
    """Below zero the cleared diagonal is a candidate as well, as in the definition."""
    made = make_inputs([[[40, 2]]], shift=2.0)
    check(made, -0.5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_keys_of_zeros(dtype: torch.dtype) -> None:
    made = make_inputs([[[20, 5]]], dtype=dtype, ordered=False)
    made.keys[0][0, 0, ::3] = 0
    made.keys[0][0, 1, :5] = 0
    check(made)
    expected = torch.tensor([0.2] * 5 + [0.0] * 15)
    torch.testing.assert_close(made.run()[0, 0, 1].cpu(), expected)


def test_one_key_is_all_there_is() -> None:
    assert make_inputs([[[1]]]).run().tolist() == [[[[1.0]]]]


def test_fixed_point_holds_the_largest_sum() -> None:
    """Cosines of 1 with all others, the most that a total of that length can be."""
    for length in (255, 256):
        made = make_inputs([[[length]]], size=16, dtype=torch.float16, ordered=False)
        made.keys[0].fill_(0.5)
        result = made.run(similarity_threshold=1.0)[0, 0, 0]
        torch.testing.assert_close(result, torch.full_like(result, 1 / length))


def test_several_parts_of_the_sum_of_directions() -> None:
    made = make_inputs([[[1030, 5]]], size=16, dtype=torch.float16, shift=2.0, ordered=False)
    triton, reference = made.run(), made.run("reference")
    torch.testing.assert_close(triton, reference, rtol=3e-5, atol=0)


def test_the_same_bits_again_and_for_each_head_alone() -> None:
    made = make_inputs([[[70, 41]]])
    result = made.run()
    assert torch.equal(result, made.run())
    assert made.order is not None
    alone = Inputs(
        [made.keys[0][:, 1:]], [made.order[0][:, 1:]], made.lengths[..., 1:], made.stored
    )
    assert torch.equal(alone.run(), result[:, :, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_the_redundancy_of_rkv(dtype: torch.dtype) -> None:
    made = make_inputs([[[90, 90], [90, 90]]], dtype=dtype, ordered=False)
    expected = RKVPolicy()._redundancy(made.keys[0])
    for implementation in ("triton", "reference"):
        torch.testing.assert_close(made.run(implementation)[0], expected, rtol=1e-5, atol=0)


def test_offsets_beyond_two_to_the_31() -> None:
    """Slots 2 GiB apart, in memory of which only what is touched exists."""
    apart, size = 2**31 + 64, 64
    if DEVICE.type == "cuda":
        memory = torch.empty(apart + 4096, dtype=torch.int8, device=DEVICE)
    else:
        memory = torch.frombuffer(mmap.mmap(-1, apart + 4096), dtype=torch.int8)
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(-127, 128, (1, 1, 2, size), generator=generator, dtype=torch.int8)
    far = memory.as_strided((1, 1, 2, size), (0, 0, apart, 1))
    far.copy_(small)
    lengths = torch.full((1, 1, 1), 2, dtype=torch.int32, device=DEVICE)
    scales = torch.full((1, 1, 2), 0.02, device=DEVICE)
    expected = Inputs([small.to(DEVICE)], None, lengths, 2, [scales]).run()
    assert torch.equal(Inputs([far], None, lengths, 2, [scales]).run(), expected)


def test_nothing_stored_and_no_rows() -> None:
    made = make_inputs([[[5, 6]]], ordered=False)
    for implementation in ("triton", "reference"):
        assert replace(made, stored=0, lengths=made.lengths * 0).run(implementation).numel() == 0
        assert not replace(made, lengths=made.lengths * 0).run(implementation).any()
        empty = Inputs([made.keys[0][:0]], None, made.lengths[:, :0], made.stored)
        assert empty.run(implementation).shape == (1, 0, 2, 6)


def test_operator() -> None:
    int8 = make_inputs([[[12, 7]], [[3, 12]]], dtype=torch.int8)
    plain = make_inputs([[[9]]], ordered=False)
    for made, implementation in ((int8, "triton"), (plain, "reference")):
        torch.library.opcheck(
            _redundancy,
            (
                made.keys,
                made.order or [],
                made.lengths,
                made.stored,
                0.5,
                made.key_scales or [],
                implementation,
            ),
        )


def test_compiles_into_one_graph() -> None:
    made = make_inputs([[[12, 7]]], ordered=False)

    def doubled(keys: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return 2 * redundancy([keys], None, lengths, 12, similarity_threshold=0.5)

    arguments = (made.keys[0], made.lengths)
    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), doubled(*arguments))


BAD: list[tuple[Callable[[Inputs], Any], type[Exception], str]] = [
    (lambda i: replace(i, keys=[]).run(), ValueError, "keys must hold one tensor"),
    (lambda i: replace(i, keys=[k.double() for k in i.keys]).run(), TypeError, r"keys\[0\] must"),
    (lambda i: replace(i, keys=[k[0] for k in i.keys]).run(), ValueError, r"keys\[0\] must have 4"),
    (lambda i: replace(i, keys=[k.mT for k in i.keys]).run(), ValueError, r"keys\[0\] must have"),
    (lambda i: replace(i, keys=[i.keys[0], i.keys[1][..., 1:]]).run(), ValueError, r"keys\[1\]"),
    (
        lambda i: replace(i, lengths=i.lengths.long()).run(),
        TypeError,
        "lengths must be torch.int32",
    ),
    (lambda i: replace(i, lengths=i.lengths[:1]).run(), ValueError, "lengths must have the shape"),
    (lambda i: replace(i, stored=1000).run(), ValueError, "stored must be between"),
    (lambda i: replace(i, order=i.order[:1]).run(), ValueError, "order must hold one tensor"),
    (
        lambda i: replace(i, key_scales=i.keys).run(),
        ValueError,
        "key_scales must be given for int8",
    ),
    (lambda i: i.run(similarity_threshold=1.5), ValueError, "similarity_threshold must be"),
    (lambda i: i.run(similarity_threshold=math.nan), ValueError, "similarity_threshold must be"),
    (lambda i: i.run("cuda"), ValueError, "implementation='cuda' is unknown"),
]


@pytest.mark.parametrize("call, error, says", BAD)
def test_bad_input(call: Callable[[Inputs], Any], error: type[Exception], says: str) -> None:
    with counted_launches() as names, pytest.raises(error, match=says) as raised:
        call(make_inputs([[[5, 6]], [[6, 2]]]))
    assert not names
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")

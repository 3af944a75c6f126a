"""Window importance: the kernel against float64, and the reference against the policies."""

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
from sparse_cache.kernels.window_importance import window_importance
from sparse_cache.kernels.window_importance.api import _window_importance
from sparse_cache.policies._observation import attention_probabilities, grouped_queries
from sparse_cache.policies.base import PolicyView
from sparse_cache.policies.rkv import RKVPolicy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
KINDS = [(n, r) for n in ("older", "causal") for r in ("mean", "max")]


@dataclass
class Inputs:
    """What `window_importance` takes, by layer."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    order: list[torch.Tensor] | None
    lengths: torch.Tensor
    stored: int
    key_scales: list[torch.Tensor] | None = None

    def run(self, implementation: str = "triton", **options: Any) -> torch.Tensor:
        options = {"window": self.queries[0].shape[2], "scaling": 0.2, **options}
        return window_importance(
            self.queries,
            self.keys,
            self.order,
            self.lengths,
            self.stored,
            key_scales=self.key_scales,
            implementation=implementation,
            **options,
        )


def make_inputs(
    lengths: Sequence[Sequence[Sequence[int]]],
    *,
    group: int = 2,
    queries: int = 4,
    size: int = 64,
    dtype: torch.dtype = torch.float32,
    query_dtype: torch.dtype | None = None,
    ordered: bool = True,
    capacities: Sequence[int] = (),
    seed: int = 0,
) -> Inputs:
    """Random inputs; keys, scales and order beyond a length are poison."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths, dtype=torch.int32)
    layers, rows, heads = counts.shape
    stored = int(counts.max())
    made = Inputs([], [], [] if ordered else None, counts.to(DEVICE), stored)
    if query_dtype is None:
        query_dtype = torch.float16 if dtype == torch.int8 else dtype
    if dtype == torch.int8:
        made.key_scales = []
    for layer in range(layers):
        capacity = capacities[layer] if capacities else stored + 3 + layer
        keys = torch.randn(rows, heads, capacity, size, generator=generator) + 0.5
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
        # As attention hands them over: tokens before heads.
        some = torch.randn(rows, queries, heads * group, size, generator=generator)
        made.queries.append(some.to(query_dtype).transpose(1, 2).to(DEVICE))
    return made


def truth(
    made: Inputs, normalization: str, group_reduction: str, window: int, scaling: float = 0.2
) -> tuple[torch.Tensor, float]:
    """The importance in float64, and the largest absolute logit."""
    found = torch.zeros((*made.lengths.shape, made.stored), dtype=torch.float64)
    largest = 0.0
    for layer, row, head in torch.cartesian_prod(*map(torch.arange, made.lengths.shape)).tolist():
        length = int(made.lengths[layer, row, head])
        slots = torch.arange(length, device=DEVICE)
        if made.order is not None:
            slots = made.order[layer][row, head, :length].long()
        keys = made.keys[layer][row, head, slots].double().cpu()
        if made.key_scales is not None:
            keys *= made.key_scales[layer][row, head, slots].double().cpu().unsqueeze(-1)
        group = made.queries[layer].shape[1] // made.lengths.shape[2]
        queries = made.queries[layer][row, head * group : (head + 1) * group].double().cpu()
        logits = torch.einsum("gwd,nd->gwn", queries, keys) * scaling
        largest = max(largest, logits.abs().max().item())
        if normalization == "older":
            older = logits[..., : max(length - window, 0)]
            reduced = older.amax(0) if group_reduction == "max" else older.mean(0)
            if reduced.shape[-1]:
                found[layer, row, head, : reduced.shape[-1]] = reduced.softmax(-1).mean(0)
            continue
        shares = []
        for back in range(min(queries.shape[1], length)):
            seen = logits[:, queries.shape[1] - 1 - back, : length - back].softmax(-1)
            shares.append(torch.nn.functional.pad(seen, (0, back)))
        share = torch.stack(shares).mean(0)
        reduced = share.amax(0) if group_reduction == "max" else share.mean(0)
        found[layer, row, head, :length] = reduced
    return found, largest


def check(
    made: Inputs,
    normalization: str,
    group_reduction: str,
    window: int,
    result: torch.Tensor | None = None,
) -> None:
    """Both implementations, of which the kernel may have run, within the bound it states."""
    expected, largest = truth(made, normalization, group_reduction, window)
    kind = {"normalization": normalization, "group_reduction": group_reduction, "window": window}
    if result is None:
        result = made.run("triton", **kind)
    for each in (result, made.run("reference", **kind)):
        assert each.dtype == torch.float32
        error = (each.double().cpu() - expected).abs()
        allowed = 2e-6 * (1 + largest) * expected + 1e-35
        assert (error <= allowed).all(), (error / expected).nan_to_num().max()
        assert (each.cpu()[expected == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "group, size, normalization, group_reduction",
    [
        *((4, 80, *kind) for kind in KINDS),
        (1, 64, "causal", "mean"),
        (7, 128, "older", "max"),
        (7, 64, "causal", "max"),
        (4, 256, "older", "mean"),
        (1, 256, "causal", "mean"),
    ],
)
def test_ragged_heads_of_all_layers_in_one_launch(
    group: int, size: int, dtype: torch.dtype, normalization: str, group_reduction: str
) -> None:
    made = make_inputs([[[1, 67]], [[20, 5]]], group=group, size=size, dtype=dtype)
    with counted_launches() as names:
        result = made.run(normalization=normalization, group_reduction=group_reduction)
    assert names == ["window_importance_kernel"]
    check(made, normalization, group_reduction, window=4, result=result)


@pytest.mark.parametrize("normalization, group_reduction", KINDS)
@pytest.mark.parametrize("query_dtype", DTYPES)
def test_int8_keys(query_dtype: torch.dtype, normalization: str, group_reduction: str) -> None:
    made = make_inputs([[[33, 9]]], size=80, dtype=torch.int8, query_dtype=query_dtype)
    check(made, normalization, group_reduction, window=4)


@pytest.mark.parametrize("normalization, group_reduction", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_queries_than_a_tile_holds(
    dtype: torch.dtype, normalization: str, group_reduction: str
) -> None:
    made = make_inputs([[[70, 21]]], group=7, queries=19, dtype=dtype)
    check(made, normalization, group_reduction, window=19)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)))
    lengths = torch.tensor(
        data.draw(st.lists(st.integers(1, 80), min_size=8, max_size=8)), dtype=torch.int32
    )[: math.prod(shape)].view(shape)
    queries = data.draw(st.sampled_from([1, 2, 8, 9]))
    made = make_inputs(
        lengths.tolist(),
        group=data.draw(st.sampled_from([1, 3, 4])),
        queries=queries,
        size=data.draw(st.sampled_from([8, 20, 33])),
        dtype=data.draw(st.sampled_from([*DTYPES, torch.int8])),
        ordered=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    kind = data.draw(st.sampled_from(KINDS))
    check(made, *kind, window=queries + data.draw(st.integers(0, 3)))


def test_a_head_shorter_than_its_window_has_no_older_keys() -> None:
    made = make_inputs([[[1, 3, 4, 5]]])
    result = made.run(normalization="older")
    assert result[0, 0, :3].count_nonzero() == 0
    assert result[0, 0, 3].tolist() == [1, 0, 0, 0, 0]


def test_empty_heads_and_expanded_lengths() -> None:
    made = make_inputs([[[9, 9]], [[9, 9]]])
    made.lengths = torch.tensor(9, dtype=torch.int32, device=DEVICE).expand(2, 1, 2)
    check(made, "older", "mean", window=4)
    made.lengths = torch.zeros((), dtype=torch.int32, device=DEVICE).expand(2, 1, 2)
    for implementation in ("triton", "reference"):
        for normalization in ("older", "causal"):
            assert not made.run(implementation, normalization=normalization).any()


def test_equal_scores_are_shared_equally() -> None:
    made = make_inputs([[[50]]], ordered=False)
    made.keys[0].fill_(0.25)
    assert torch.allclose(made.run()[0, 0, 0, :46], torch.tensor(1 / 46, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_that_cancel_out_in_their_group(dtype: torch.dtype) -> None:
    """The mean over a group is small against its members: averaged 16-bit queries would be off."""
    made = make_inputs([[[60]]], group=2, queries=1, dtype=dtype)
    large = (made.queries[0][:, :1] * 8).to(dtype)
    made.queries[0] = torch.cat([large, -large], dim=1)
    made.queries[0][:, 1, :, ::2] *= 1 + 2**-7
    check(made, "older", "mean", window=1)


@pytest.mark.parametrize("group_reduction", ["mean", "max"])
def test_older_is_the_importance_of_rkv(group_reduction: str) -> None:
    made = make_inputs([[[41, 41], [41, 41]]], ordered=False, capacities=[41])
    view = policy_view(made)
    policy = RKVPolicy(kernel_size=1, group_reduction=group_reduction)
    for implementation in ("triton", "reference"):
        result = made.run(implementation, group_reduction=group_reduction)[0]
        torch.testing.assert_close(
            result[..., :37], policy._importance(view, 37), rtol=1e-5, atol=1e-9
        )
        assert not result[..., 37:].any()


@pytest.mark.parametrize("queries", [1, 4])
def test_causal_is_the_attention_of_snapkv_and_tova(queries: int) -> None:
    made = make_inputs([[[41, 41], [41, 41]]], ordered=False, capacities=[41], queries=queries)
    view = policy_view(made)
    attention = attention_probabilities(grouped_queries(view, "test"), view).mean(dim=3)
    for implementation in ("triton", "reference"):
        for reduction, expected in (("mean", attention.mean(2)), ("max", attention.amax(2))):
            result = made.run(implementation, normalization="causal", group_reduction=reduction)[0]
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-9)


def policy_view(made: Inputs) -> PolicyView:
    """What a policy sees of the first layer, without holes."""
    keys = made.keys[0]
    return PolicyView(
        keys=keys,
        values=keys,
        positions=torch.arange(keys.shape[2], device=DEVICE).expand(keys.shape[:3]),
        seen=torch.full(keys.shape[:1], keys.shape[2], device=DEVICE),
        queries=made.queries[0],
        attention_mass=None,
        scaling=0.2,
        window=made.queries[0].shape[2],
        sinks=0,
        budget=16,
        layer_idx=0,
    )


def test_offsets_beyond_two_to_the_31() -> None:
    """Rows of keys and queries 2 GiB apart, in memory of which only what is touched exists."""
    apart, size = 2**31 + 64, 64
    if DEVICE.type == "cuda":
        memory = torch.empty(apart + 4096, dtype=torch.int8, device=DEVICE)
    else:
        memory = torch.frombuffer(mmap.mmap(-1, apart + 4096), dtype=torch.int8)
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(-127, 128, (1, 1, 2, size), generator=generator, dtype=torch.int8)
    queries = torch.randn(1, 2, 1, size, generator=generator).half().to(DEVICE)
    far = memory.as_strided((1, 1, 2, size), (0, 0, apart, 1))
    far.copy_(small)
    lengths = torch.full((1, 1, 1), 2, dtype=torch.int32, device=DEVICE)
    scales = torch.full((1, 1, 2), 0.02, device=DEVICE)
    far_queries = (
        memory[1024:].view(torch.float16).as_strided((1, 2, 1, size), (0, apart // 2, 0, 1))
    )
    far_queries.copy_(queries)
    near = Inputs([queries], [small.to(DEVICE)], None, lengths, 2, [scales])
    expected = near.run(normalization="causal")
    assert not torch.equal(expected[..., 0], expected[..., 1])
    strided = Inputs([far_queries], [far], None, lengths, 2, [scales])
    assert torch.equal(strided.run(normalization="causal"), expected)


def test_the_same_bits_again() -> None:
    made = make_inputs([[[60, 33]]], group=4, queries=20)
    assert torch.equal(made.run(), made.run())


def test_nothing_stored_and_no_rows() -> None:
    made = make_inputs([[[5, 6]]])
    for implementation in ("triton", "reference"):
        assert replace(made, stored=0, lengths=made.lengths * 0).run(implementation).numel() == 0
        empty = Inputs(
            [made.queries[0][:0]], [made.keys[0][:0]], None, made.lengths[:, :0], made.stored
        )
        assert empty.run(implementation).shape == (1, 0, 2, 6)


def test_operator() -> None:
    made = make_inputs([[[12, 7]], [[3, 12]]], dtype=torch.int8)
    plain = make_inputs([[[9]]], ordered=False)
    for each, normalization, implementation in (
        (made, "older", "triton"),
        (plain, "causal", "reference"),
    ):
        torch.library.opcheck(
            _window_importance,
            (
                each.queries,
                each.keys,
                each.order or [],
                each.lengths,
                each.stored,
                4,
                0.1,
                normalization,
                "mean",
                each.key_scales or [],
                implementation,
            ),
        )


def test_compiles_into_one_graph() -> None:
    made = make_inputs([[[12, 7]]])

    def doubled(queries: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return 2 * window_importance([queries], [keys], None, lengths, 12, window=4, scaling=0.2)

    arguments = (made.queries[0], made.keys[0], made.lengths)
    compiled = torch.compile(doubled, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), doubled(*arguments))


BAD: list[tuple[Callable[[Inputs], Any], type[Exception], str]] = [
    (lambda i: replace(i, keys=[]).run(), ValueError, "keys must hold one tensor"),
    (lambda i: replace(i, keys=[k.double() for k in i.keys]).run(), TypeError, r"keys\[0\] must"),
    (lambda i: replace(i, keys=[i.keys[0], i.keys[1].half()]).run(), TypeError, r"keys\[1\] must"),
    (lambda i: replace(i, keys=[k[0] for k in i.keys]).run(), ValueError, r"keys\[0\] must have 4"),
    (lambda i: replace(i, keys=[k.mT for k in i.keys]).run(), ValueError, r"keys\[0\] must have"),
    (lambda i: replace(i, keys=[k.to("meta") for k in i.keys]).run(), ValueError, "lengths must"),
    (lambda i: replace(i, queries=i.queries[:1]).run(), ValueError, "queries must hold"),
    (lambda i: replace(i, queries=[q.half() for q in i.queries]).run(), TypeError, r"queries\[0\]"),
    (lambda i: replace(i, queries=[q[:, :3] for q in i.queries]).run(), ValueError, "query heads"),
    (lambda i: replace(i, queries=[q[:, :0] for q in i.queries]).run(), ValueError, "query heads"),
    (lambda i: replace(i, queries=[q[..., :9] for q in i.queries]).run(), ValueError, "head size"),
    (lambda i: replace(i, queries=[q[:, :, :0] for q in i.queries]).run(), ValueError, "at least"),
    (
        lambda i: replace(i, lengths=i.lengths.long()).run(),
        TypeError,
        "lengths must be torch.int32",
    ),
    (lambda i: replace(i, lengths=i.lengths[:1]).run(), ValueError, "lengths must have the shape"),
    (lambda i: replace(i, stored=1000).run(), ValueError, "stored must be between"),
    (lambda i: replace(i, stored=1.5).run(), TypeError, "stored must be an int"),
    (lambda i: replace(i, order=[o.long() for o in i.order]).run(), TypeError, r"order\[0\] must"),
    (lambda i: replace(i, order=[o[..., 1:] for o in i.order]).run(), ValueError, r"order\[0\]"),
    (
        lambda i: replace(i, key_scales=i.keys).run(),
        ValueError,
        "key_scales must be given for int8",
    ),
    (lambda i: i.run(window=3), ValueError, "window must be at least 4"),
    (lambda i: i.run(window=4.0), TypeError, "window must be an int"),
    (lambda i: i.run(scaling=math.nan), ValueError, "scaling must be a finite number"),
    (lambda i: i.run(normalization="newer"), ValueError, "normalization must be"),
    (lambda i: i.run(group_reduction="sum"), ValueError, "group_reduction must be"),
    (lambda i: i.run("cuda"), ValueError, "implementation='cuda' is unknown"),
]


@pytest.mark.parametrize("call, error, says", BAD)
def test_bad_input(call: Callable[[Inputs], Any], error: type[Exception], says: str) -> None:
    with counted_launches() as names, pytest.raises(error, match=says) as raised:
        call(make_inputs([[[5, 6]], [[6, 2]]]))
    assert not names
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


def test_int8_keys_need_scales() -> None:
    made = make_inputs([[[5, 6]]], dtype=torch.int8)
    made.key_scales = None
    with pytest.raises(ValueError, match="key_scales must be given"):
        made.run()

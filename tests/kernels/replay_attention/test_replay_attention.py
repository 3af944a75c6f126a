"""Attention by period against the `[T, T]` matrix in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.kernels.replay_attention import (
    gathered_pairs,
    replay_attention,
    visible_pairs,
)
from sparse_cache.kernels.replay_attention.periods import LONGEST, blocks_of

from .schedules import NEVER, batch_of, causal_deaths, evicting_deaths


@dataclass
class Case:
    """Inputs and what they mean."""

    tensors: list[torch.Tensor]
    deaths: torch.Tensor
    options: dict[str, Any]
    grad: torch.Tensor

    def run(self, dtype: torch.dtype, implementation: str) -> list[torch.Tensor]:
        """Output and gradients."""
        tensors = [t.to(dtype).clone().requires_grad_() for t in self.tensors]
        options = dict(self.options)
        if options["sinks"] is not None:
            options["sinks"] = options["sinks"].to(dtype).clone().requires_grad_()
            tensors.append(options["sinks"])
        output = replay_attention(
            *tensors[:3], self.deaths, **options, implementation=implementation
        )
        grads = torch.autograd.grad(output, tensors, self.grad.to(dtype))
        return [output.detach(), *grads]


def random_case(
    deaths: torch.Tensor,
    *,
    heads: int,
    group: int = 2,
    size: int = 8,
    value_size: int = 8,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    batch, length = deaths.shape[0], deaths.shape[2]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # As transformers hands them over: a transposed view of [B, T, heads, D].
    tensors = [
        draw(batch, length, count, width).transpose(1, 2)
        for count, width in ((heads * group, size), (heads, size), (heads, value_size))
    ]
    options = {
        "scaling": size**-0.5,
        "softcap": softcap,
        "sinks": draw(heads * group) if sinks else None,
    }
    grad = draw(batch, heads * group, length, value_size)
    return Case(tensors, deaths, options, grad)


def check(case: Case, tolerance: float = 1e-4) -> None:
    """Output within its bound, gradients within a relative tolerance, all of them finite."""
    truth = case.run(torch.float64, "reference")
    found = case.run(torch.float32, "torch")
    query, key, value = (t.double() for t in case.tensors)
    largest = (
        query.abs()
        @ key.abs().repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
    ).max() * case.options["scaling"]
    bound = 2**-20 * (16 + largest + (case.options["softcap"] or 0)) * value.abs().max()
    assert (found[0] - truth[0]).abs().max() <= bound
    # One gradient may be exactly 0, as that of queries which see themselves alone.
    scale = max(float(theirs.norm()) for theirs in truth[1:])
    for mine, theirs in zip(found[1:], truth[1:], strict=True):
        assert torch.isfinite(mine).all()
        assert (mine - theirs).norm() <= tolerance * theirs.norm() + 1e-6 * scale


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 400))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    alike = draw(st.booleans())
    rows = [
        evicting_deaths(
            1 if alike else heads,
            length,
            budget=draw(st.integers(1, 60)),
            interval=draw(st.sampled_from([1, 2, 30, 64, 100])),
            prompt=draw(st.integers(1, 250)),
            padding=draw(st.sampled_from([0, 0, length // 3, length])),
            ragged=draw(st.booleans()),
            generator=generator,
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    return random_case(
        batch_of(rows),
        heads=heads,
        group=draw(st.sampled_from([1, 3, 4])),
        size=draw(st.sampled_from([4, 9])),
        value_size=draw(st.sampled_from([4, 7])),
        softcap=draw(st.sampled_from([None, 2.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(case=cases())
def test_any_schedule(case: Case) -> None:
    check(case)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.data())
def test_deaths_without_a_schedule(data: st.DataObject) -> None:
    """Each token dies when it likes, or is padding in the middle of a row."""
    length = data.draw(st.integers(1, 200))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    lives = torch.randint(1, data.draw(st.integers(2, 300)), (2, 2, length), generator=generator)
    deaths = torch.arange(length) + lives
    deaths = torch.where(deaths >= length, NEVER, deaths).int()
    padding = torch.rand(2, 1, length, generator=generator) < data.draw(st.sampled_from([0, 0.2]))
    check(random_case(deaths.masked_fill(padding, 0), heads=2))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 300])
def test_nothing_dies(length: int) -> None:
    case = random_case(causal_deaths(2, 2, length), heads=2)
    check(case)
    query, key, value = case.tensors
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    mine = replay_attention(query, key, value, case.deaths, scaling=8**-0.5)
    assert (mine - expected).abs().max() < 1e-5


def test_nan_of_padding_stays_there() -> None:
    deaths = causal_deaths(1, 2, 150)
    deaths[:, :, :40] = deaths[:, :, 90:100] = 0
    case = random_case(deaths, heads=2)
    clean = case.run(torch.float32, "torch")
    real = deaths[0, 0] > 0
    for tensor in case.tensors:
        tensor[:, :, ~real] = float("nan")
    for implementation in ("torch", "reference"):
        found = case.run(torch.float32, implementation)
        for mine, theirs in zip(found, clean, strict=True):
            assert torch.allclose(mine[:, :, real], theirs[:, :, real], atol=1e-5)
            assert torch.isfinite(mine).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    deaths = evicting_deaths(2, 300, budget=40, interval=30, prompt=50, generator=generator)[None]
    case = random_case(deaths, heads=2, sinks=True)
    case.tensors = [tensor.to(dtype) for tensor in case.tensors]
    truth = case.run(torch.float64, "reference")
    found = case.run(dtype, "torch")
    epsilon = torch.finfo(dtype).eps
    for mine, theirs in zip(found, truth, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() <= 4 * epsilon * theirs.norm()


def test_same_bits_in_every_run() -> None:
    generator = torch.Generator().manual_seed(0)
    deaths = evicting_deaths(3, 400, budget=60, interval=70, prompt=90, generator=generator)[None]
    case = random_case(deaths, heads=3)
    for first, second in zip(
        case.run(torch.float32, "torch"), case.run(torch.float32, "torch"), strict=True
    ):
        assert torch.equal(first, second)


def test_blocks_see_no_more_than_budget_and_interval() -> None:
    """The cost that the method promises, and that blocks begin at evictions."""
    generator = torch.Generator().manual_seed(0)
    deaths = evicting_deaths(2, 4000, budget=256, interval=128, prompt=384, generator=generator)
    found = blocks_of(deaths[None])
    assert [block.start for block in found[3:]] == list(range(384, 4000, 128))
    assert {block.width for block in found[3:]} == {256}
    assert all(block.is_causal for block in found)
    assert all(isinstance(block.prefix, slice) for block in found[:3])
    assert max(block.stop - block.start for block in found) <= LONGEST
    pairs = gathered_pairs(deaths[None])
    assert visible_pairs(deaths[None]) <= pairs <= 2 * 4000 * (256 + 128)
    small = deaths[None, :, :300]
    column = torch.arange(300)
    visible = (column <= column[:, None]) & (column[:, None] < small[..., None, :])
    assert visible_pairs(small) == int(visible.sum())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_and_compiled(reentrant: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    deaths = evicting_deaths(2, 100, budget=20, interval=16, prompt=30, generator=generator)[None]
    case = random_case(deaths, heads=2, sinks=True)
    expected = case.run(torch.float32, "torch")
    tensors = [tensor.clone().requires_grad_() for tensor in case.tensors]
    sinks = case.options["sinks"].clone().requires_grad_()

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return replay_attention(
            *tensors[:3], deaths, scaling=case.options["scaling"], sinks=tensors[3]
        )

    if not reentrant:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    output = torch.utils.checkpoint.checkpoint(attend, *tensors, sinks, use_reentrant=reentrant)
    found = torch.autograd.grad(output, [*tensors, sinks], case.grad) if not reentrant else None
    if reentrant:
        output.backward(case.grad)
        found = [tensor.grad for tensor in (*tensors, sinks)]
    for mine, theirs in zip(found, expected[1:], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_the_operators_are_sound() -> None:
    generator = torch.Generator().manual_seed(0)
    deaths = evicting_deaths(2, 40, budget=9, interval=7, prompt=12, generator=generator)[None]
    case = random_case(deaths, heads=2)
    tensors = [tensor.clone().requires_grad_() for tensor in case.tensors]
    operator = torch.ops.sparse_budget_cache.replay_attention.default
    torch.library.opcheck(operator, (*tensors, deaths, 0.3, None, None, "torch"))
    torch.library.opcheck(
        operator, (*tensors, deaths, 0.3, 5.0, torch.randn(4, requires_grad=True), "torch")
    )


def test_only_some_gradients() -> None:
    case = random_case(causal_deaths(1, 2, 20), heads=2)
    query, key, value = case.tensors
    value.requires_grad_()
    replay_attention(query, key, value, case.deaths, scaling=1.0).sum().backward()
    assert query.grad is None and value.grad is not None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"deaths": torch.zeros(1, 2, 20)}, TypeError, "deaths must be int32"),
        ({"deaths": causal_deaths(1, 3, 20)}, ValueError, r"deaths must be \[1, 2 or 1, 20\]"),
        ({"deaths": causal_deaths(1, 2, 21)}, ValueError, r"deaths must be \[1, 2 or 1, 20\]"),
        ({"key": torch.zeros(1, 2, 19, 8)}, ValueError, "key must be"),
        ({"key": torch.zeros(1, 2, 20, 8).half()}, TypeError, "key must have"),
        ({"key": torch.zeros(1, 3, 20, 8)}, ValueError, "value must be"),
        ({"value": torch.zeros(1, 2, 20)}, ValueError, "value must be"),
        ({"query": torch.zeros(1, 3, 20, 8)}, ValueError, "3 heads, which 2 KV heads do not"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be \[4\]"),
        ({"softcap": 0.0}, ValueError, "softcap=0.0 must be positive"),
        ({"softcap": float("inf")}, ValueError, "softcap=inf must be positive and finite"),
        ({"softcap": float("nan")}, ValueError, "softcap=nan must be"),
        ({"scaling": float("nan")}, ValueError, "scaling=nan must be finite"),
        ({"scaling": float("inf")}, ValueError, "scaling=inf must be finite"),
        ({"deaths": causal_deaths(1, 2, 20) * 0 - 1}, ValueError, "not be negative, got -1"),
        ({"implementation": "fast"}, ValueError, "implementation='fast' is unknown"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {
        "query": torch.zeros(1, 4, 20, 8),
        "key": torch.zeros(1, 2, 20, 8),
        "value": torch.zeros(1, 2, 20, 8),
        "deaths": causal_deaths(1, 2, 20),
        "scaling": 1.0,
    }
    with pytest.raises(error, match=message):
        replay_attention(**(good | change))

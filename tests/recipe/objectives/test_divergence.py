"""Divergences against loops in double precision, and what they do with places without a number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives import FullKL, k1, k3
from sparse_cache.recipe.objectives.divergence import DIRECTIONS

INF, NAN = math.inf, math.nan


def test_the_estimates_by_hand() -> None:
    # p = 1/2, q = 1/8: log(p / q) = log 4, and q / p - 1 - log(q / p) = 1/4 - 1 + log 4.
    p = torch.tensor(0.5).log().requires_grad_()
    q = torch.tensor(0.125).log()
    assert k1(p, q).item() == pytest.approx(math.log(4))
    found = k3(p, q)
    assert found.item() == pytest.approx(-0.75 + math.log(4))
    found.backward()
    # d/dp of exp(q - p) - 1 - (q - p) is 1 - q / p.
    assert p.grad is not None
    assert p.grad.item() == pytest.approx(0.75)
    assert k3(q, q).item() == 0.0
    assert k1(q, q).item() == 0.0


@settings(max_examples=60, deadline=None)
@given(new=st.floats(-60, 0, width=32), other=st.floats(-60, 0, width=32))
def test_k3_against_double_precision(new: float, other: float) -> None:
    p = torch.tensor(new, requires_grad=True)
    found = k3(p, torch.tensor(other))
    found.backward()
    gap = min(other - new, 20.0)
    assert found.item() == pytest.approx(math.expm1(gap) - gap, rel=1e-4, abs=1e-5)
    slope = 0.0 if other - new > 20 else -math.expm1(gap)
    assert p.grad is not None
    assert p.grad.item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("new", "other"),
    [(-1.0, -INF), (-INF, -1.0), (-INF, -INF), (NAN, -1.0), (-1.0, NAN), (-300.0, 0.0)],
)
def test_k3_of_a_masked_place_has_no_gradient(new: float, other: float) -> None:
    logprobs = torch.tensor([math.log(0.5), new], requires_grad=True)
    found = k3(logprobs, torch.tensor([math.log(0.125), other]))
    torch.where(torch.tensor([True, False]), found, 0.0).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.75, 0.0])


def test_the_whole_vocabulary_by_hand() -> None:
    # d = (3/4, 1/4), s = (1/2, 1/2).
    def of(direction: str) -> tuple[float, list[float] | None, list[float] | None]:
        dense = torch.tensor([3.0, 1.0]).log().requires_grad_()
        shadow = torch.zeros(2, requires_grad=True)
        found = FullKL(direction)(dense, shadow)
        found.backward()
        grads = [None if x.grad is None else x.grad.tolist() for x in (dense, shadow)]
        return found.item(), grads[0], grads[1]

    value, dense, shadow = of("shadow_to_dense")
    assert value == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert dense is None
    assert shadow == pytest.approx([-0.25, 0.25])
    backward = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    value, dense, shadow = of("dense_to_shadow")
    assert value == pytest.approx(backward)
    assert dense == pytest.approx([0.25, -0.25])
    assert shadow is None
    value, dense, shadow = of("both")
    assert value == pytest.approx(backward)
    assert dense == pytest.approx([0.25, -0.25])
    # s * (log(s / d) - KL).
    expected = [0.5 * (math.log(2 / 3) - backward), 0.5 * (math.log(2) - backward)]
    assert shadow == pytest.approx(expected, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    direction=st.sampled_from(DIRECTIONS),
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
)
def test_against_a_loop(seed: int, direction: str, temperature: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    dense, shadow = torch.randn(2, 3, 6, generator=generator) * scale
    found = FullKL(direction, temperature)(dense, shadow)
    assert found.dtype == torch.float32
    for row in range(3):
        logs = []
        for logits in (dense[row].tolist(), shadow[row].tolist()):
            scaled = [x / temperature for x in logits]
            norm = max(scaled) + math.log(sum(math.exp(x - max(scaled)) for x in scaled))
            logs.append([x - norm for x in scaled])
        p, q = logs if direction == "shadow_to_dense" else logs[::-1]
        expected = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert found[row].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "row", [[NAN, 0.0, 1.0], [INF, 0.0, 1.0], [-INF] * 3, [NAN] * 3, [INF, -INF, 0.0]]
)
@pytest.mark.parametrize("side", ["dense", "shadow"])
def test_logits_that_are_no_distribution(direction: str, row: list[float], side: str) -> None:
    """They are NaN where they count, and nothing, gradients included, where they are masked."""
    good = [0.0, 1.0, 2.0]
    dense = torch.tensor([good, row if side == "dense" else good], requires_grad=True)
    shadow = torch.tensor([good[::-1], row if side == "shadow" else good], requires_grad=True)
    found = FullKL(direction)(dense, shadow)
    assert found.isnan().tolist() == [False, True]
    # The caller's logits stay what they were.
    assert not bool(torch.cat([dense, shadow]).isfinite().all())
    torch.where(torch.tensor([True, False]), found, 0.0).sum().backward()
    moved = [x.grad for x in (dense, shadow) if x.grad is not None]
    assert moved
    for gradient in moved:
        assert bool(gradient.isfinite().all())
        assert gradient[0].abs().sum() > 0
        assert gradient[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_policies_do_not_diverge(direction: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50) * 5
    dense, shadow = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = FullKL(direction)(dense, shadow)
    assert found.abs().max().item() == 0.0
    found.sum().backward()
    for moved in (dense, shadow):
        assert moved.grad is None or moved.grad.abs().max().item() < 1e-6


def test_half_precision_is_computed_in_single() -> None:
    torch.manual_seed(0)
    dense, shadow = torch.randn(2, 4, 9, dtype=torch.bfloat16)
    moved = shadow.clone().requires_grad_()
    found = FullKL()(dense, moved)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, FullKL()(dense.float(), shadow.float()))
    found.sum().backward()
    assert moved.grad is not None
    assert moved.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_a_temperature_that_makes_no_sense_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature=.* must be positive"):
        FullKL(temperature=temperature)

"""One step of each estimator by hand, and the clipped surrogate against a loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives import (
    clipped_surrogate,
    group_advantages,
    token_coefficients,
)

# A group of two: the first is right, with two tokens; the second is wrong, with one.
REWARDS = torch.tensor([1.0, 0.0])
MASK = torch.tensor([[1, 1], [1, 0]]).bool()
RATIOS = torch.tensor([[1.5, 0.5], [1.1, 99.0]])


def _step(
    advantages: torch.Tensor, aggregation: str, longest: int = 4, clip_high: float = 0.2
) -> tuple[float, list[list[float]]]:
    """The loss and its gradient in the log-probabilities."""
    logprobs = RATIOS.log().requires_grad_()
    losses = clipped_surrogate(logprobs, torch.zeros(2, 2), advantages, clip_high=clip_high).loss
    loss = (losses * token_coefficients(MASK, aggregation, longest=longest)).sum()
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist()


def _assert_rows(found: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-6, rtol=1e-5)


def test_grpo_by_hand() -> None:
    # Advantages +-0.5 over a deviation of sqrt(0.5).
    size = 0.5 / (math.sqrt(0.5) + 1e-4)
    loss, gradient = _step(group_advantages(REWARDS, 2), "sequence")
    assert loss == pytest.approx(size * (-(1.2 + 0.5) / 2 + 1.1) / 2, rel=1e-5)
    _assert_rows(gradient, [[0.0, -0.5 * size / 4], [1.1 * size / 2, 0.0]])


def test_dr_grpo_by_hand() -> None:
    advantages = group_advantages(REWARDS, 2, divide_by_std=False)
    loss, gradient = _step(advantages, "constant")
    assert loss == pytest.approx(0.5 * (-1.2 - 0.5 + 1.1) / (2 * 4))
    _assert_rows(gradient, [[0.0, -0.25 / 8], [0.55 / 8, 0.0]])


def test_dapo_by_hand() -> None:
    size = 0.5 / (math.sqrt(0.5) + 1e-4)
    loss, gradient = _step(group_advantages(REWARDS, 2), "token", clip_high=0.28)
    assert loss == pytest.approx(size * (-1.28 - 0.5 + 1.1) / 3, rel=1e-5)
    _assert_rows(gradient, [[0.0, -0.5 * size / 3], [1.1 * size / 3, 0.0]])


def test_rloo_by_hand() -> None:
    advantages = group_advantages(REWARDS, 2, baseline="leave_one_out", divide_by_std=False)
    assert advantages.tolist() == [1.0, -1.0]
    loss, gradient = _step(advantages, "sequence")
    assert loss == pytest.approx((-(1.2 + 0.5) / 2 + 1.1) / 2)
    _assert_rows(gradient, [[0.0, -0.5 / 4], [1.1 / 2, 0.0]])


def test_a_group_without_variance_moves_nothing() -> None:
    loss, gradient = _step(group_advantages(torch.ones(2), 2), "sequence")
    assert loss == 0.0
    assert gradient == [[0.0, 0.0], [0.0, 0.0]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    width=st.integers(1, 5),
    clip_low=st.sampled_from([0.0, 0.1, 0.2]),
    clip_high=st.sampled_from([0.0, 0.2, 0.28, math.inf]),
)
def test_against_a_loop(
    seed: int, rows: int, width: int, clip_low: float, clip_high: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator) * 5
    logprobs = old + torch.randn(rows, width, generator=generator) * 0.3
    advantages = torch.randn(rows, generator=generator)
    logprobs.requires_grad_()
    found = clipped_surrogate(logprobs, old, advantages, clip_low=clip_low, clip_high=clip_high)
    found.loss.sum().backward()
    assert logprobs.grad is not None
    for row in range(rows):
        advantage = advantages[row].item()
        for column in range(width):
            ratio = math.exp(logprobs[row, column].item() - old[row, column].item())
            held = min(max(ratio, 1 - clip_low), 1 + clip_high)
            expected = -min(ratio * advantage, held * advantage)
            assert found.loss[row, column].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
            clipped = held * advantage < ratio * advantage
            assert bool(found.clipped[row, column]) == clipped
            slope = 0.0 if clipped else -ratio * advantage
            assert logprobs.grad[row, column].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    ("new", "old"),
    [(-1.0, -INF), (-INF, -1.0), (-INF, -INF), (NAN, -1.0), (-1.0, NAN), (0.0, -200.0), (INF, INF)],
)
def test_a_masked_place_has_no_gradient_whatever_it_holds(
    new: float, old: float, advantage: float
) -> None:
    logprobs = torch.tensor([[-1.0, new]], requires_grad=True)
    before = torch.tensor([[-1.0, old]])
    losses = clipped_surrogate(logprobs, before, torch.tensor([advantage])).loss
    torch.where(torch.tensor([[True, False]]), losses, 0.0).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-advantage, 0.0]]


def test_a_place_that_counts_shows_that_it_is_no_number() -> None:
    found = clipped_surrogate(torch.tensor([[NAN]]), torch.tensor([[-1.0]]), torch.tensor([1.0]))
    assert bool(found.loss.isnan().all())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_stays_finite(advantage: float) -> None:
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    loss = clipped_surrogate(logprobs, torch.tensor([[-500.0]]), torch.tensor([advantage])).loss
    loss.sum().backward()
    assert logprobs.grad is not None
    assert bool(loss.isfinite().all() & logprobs.grad.isfinite().all())


def test_half_precision_is_computed_in_single() -> None:
    old = torch.tensor([[-2.0, -3.0]], dtype=torch.bfloat16)
    new = torch.tensor([[-1.9375, -3.015625]], dtype=torch.bfloat16)
    found = clipped_surrogate(new, old, torch.tensor([1.0], dtype=torch.bfloat16)).loss
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, -torch.tensor([[0.0625, -0.015625]]).exp())

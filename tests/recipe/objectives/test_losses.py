"""The surrogate, its aggregation, divergences and preferences: one step of each by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives import (
    AGGREGATIONS,
    FullKL,
    clipped_surrogate,
    k1,
    k3,
    preference_loss,
    preference_pairs,
    token_coefficients,
)
from sparse_cache.recipe.objectives.budget_control import BudgetControl


def test_the_surrogate_by_hand() -> None:
    ratios = torch.tensor([[1.0, 1.5, 0.5], [1.0, 1.5, 0.5]])
    logprobs = ratios.log().requires_grad_()
    found = clipped_surrogate(
        logprobs, torch.zeros(2, 3), torch.tensor([2.0, -1.0]), clip_low=0.2, clip_high=0.3
    )
    # Better than the group: a rise counts up to 1.3; worse: a fall counts down to 0.8.
    expected = [[-2.0, -2.6, -1.0], [1.0, 1.5, 0.8]]
    torch.testing.assert_close(found.loss, torch.tensor(expected))
    assert found.clipped.tolist() == [[False, True, False], [False, False, True]]
    found.loss.sum().backward()
    # The gradient of a ratio is the ratio, where nothing is clipped.
    gradient = [[-2.0, 0.0, -1.0], [1.0, 1.5, 0.0]]
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient))


MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()


def test_each_aggregation_by_hand() -> None:
    losses = torch.tensor([[1.0, 2, 3, 4], [5, 9, 9, 9], [6, 8, 9, 9]])

    def loss(aggregation: str, mask: torch.Tensor = MASK) -> float:
        return float((losses * token_coefficients(mask, aggregation, longest=5)).sum())

    assert loss("sequence") == pytest.approx((2.5 + 5 + 7) / 3)
    assert loss("token") == pytest.approx((10 + 5 + 14) / 7)
    assert loss("constant") == pytest.approx((10 + 5 + 14) / 15)
    # A rejected rollout leaves the denominators too.
    without = MASK & torch.tensor([True, False, True])[:, None]
    assert loss("sequence", without) == pytest.approx((2.5 + 7) / 2)
    assert loss("token", without) == pytest.approx(24 / 6)
    assert loss("constant", without) == pytest.approx(24 / 10)
    assert all(loss(name, torch.zeros_like(MASK)) == 0.0 for name in AGGREGATIONS)
    with pytest.raises(ValueError, match="aggregation='mean'"):
        token_coefficients(MASK, "mean", longest=5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 9),
    processes=st.integers(1, 3),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_any_division_adds_up_to_the_whole(
    seed: int, rows: int, processes: int, aggregation: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (rows * processes, 1), generator=generator)
    mask = torch.arange(6) < lengths
    losses = torch.randn(rows * processes, 6, generator=generator)
    whole = float((losses * token_coefficients(mask, aggregation, longest=6)).sum())
    parts = mask.split(rows)
    totals: list[torch.Tensor] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        totals.append(tensor)
        return tensor

    for part in parts:
        token_coefficients(part, aggregation, longest=6, total=record)
    each = len(totals) // len(parts)
    sums = [sum(totals[number::each]) for number in range(each)]
    found = 0.0
    for part, own in zip(parts, losses.split(rows), strict=True):
        answers = iter(sums)
        coefficients = token_coefficients(
            part, aggregation, longest=6, total=lambda _, answers=answers: next(answers)
        )
        found += float((own * coefficients).sum())
    assert found == pytest.approx(whole, abs=1e-5)


def test_estimates_of_a_divergence() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    assert float((p * k1(p.log(), q.log())).sum()) == pytest.approx(exact, abs=1e-6)
    assert float((p * k3(p.log(), q.log())).sum()) == pytest.approx(exact, abs=1e-6)
    assert bool((k3(p.log(), q.log()) >= 0).all())
    assert float(k3(torch.tensor(-1.0), torch.tensor(-1.0 + math.log(2)))) == pytest.approx(
        2 - 1 - math.log(2)
    )
    assert math.isfinite(float(k3(torch.tensor(-500.0), torch.tensor(0.0))))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_whole_vocabulary_in_each_direction(temperature: float) -> None:
    torch.manual_seed(0)
    start = torch.randn(2, 3, 7, dtype=torch.float32)
    other = torch.randn(2, 3, 7)

    def of(direction: str) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        dense, shadow = start.clone().requires_grad_(), other.clone().requires_grad_()
        found = FullKL(direction, temperature)(dense, shadow)
        found.sum().backward()
        return found.detach(), dense.grad, shadow.grad

    d, s = ((x.double() / temperature).softmax(-1) for x in (start, other))
    forward, backward = ((s * (s / d).log()).sum(-1), (d * (d / s).log()).sum(-1))
    found, dense, shadow = of("dense_to_shadow")
    torch.testing.assert_close(found.double(), forward, atol=1e-5, rtol=1e-5)
    assert shadow is None
    # The gradient of a cross entropy in the logits: predicted minus target.
    torch.testing.assert_close(dense.double(), (d - s) / temperature, atol=1e-5, rtol=1e-4)
    found, dense, shadow = of("shadow_to_dense")
    torch.testing.assert_close(found.double(), backward, atol=1e-5, rtol=1e-5)
    assert dense is None
    torch.testing.assert_close(shadow.double(), (s - d) / temperature, atol=1e-5, rtol=1e-4)
    found, dense, shadow = of("both")
    torch.testing.assert_close(found.double(), forward, atol=1e-5, rtol=1e-5)
    assert dense is not None and shadow is not None
    with pytest.raises(ValueError, match="distill_direction='up'"):
        FullKL("up")


def test_words_that_cannot_be_said_do_not_spoil_the_divergence() -> None:
    logits = torch.tensor([[0.0, 1.0, float("-inf")]])
    for direction in ("shadow_to_dense", "dense_to_shadow", "both"):
        dense = logits.clone().requires_grad_()
        shadow = (logits + torch.tensor([0.0, 1.0, 0.0])).requires_grad_()
        found = FullKL(direction)(dense, shadow)
        found.sum().backward()
        assert bool(torch.isfinite(found).all())
        for moved in (dense, shadow):
            assert moved.grad is None or bool(torch.isfinite(moved.grad).all())


def test_pairs_of_a_group() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.2, 0.9, 0.1])
    assert preference_pairs(rewards, 3).tolist() == [[1, 0], [-1, -1], [7, 8]]
    kept = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 0]).bool()
    assert preference_pairs(rewards, 3, kept).tolist() == [[2, 0], [-1, -1], [-1, -1]]
    assert preference_pairs(rewards, 3, torch.zeros(9).bool()).tolist() == [[-1, -1]] * 3


def test_a_preference_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -2.0], [-0.5, -1.0]])
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    (found,) = preference_loss(logprobs, reference, weights, beta=0.5)
    # Log-ratios 0.5 and -0.5: beta times their difference is 0.5.
    assert float(found) == pytest.approx(math.log(1 + math.exp(-0.5)))
    found.backward()
    slope = 0.5 / (1 + math.exp(0.5))
    expected = torch.tensor([[-slope, -slope], [slope, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected)


def test_the_budget_follows_the_tail() -> None:
    control = BudgetControl(100, 50, 130, target=0.8, factor=1.2, slack=0.05)
    assert control.update(0.5) == 120
    assert control.update(0.5) == 130
    assert control.update(0.82) == 130
    assert control.update(0.95) == 108
    assert [control.update(0.95) for _ in range(6)][-1] == 50
    small = BudgetControl(4, 1, 9, target=0.8, factor=1.01)
    assert small.update(0.1) == 5
    assert small.update(0.99) == 4
    for bad in ({"target": 1.5}, {"factor": 1.0}, {"budget": 5}):
        with pytest.raises(ValueError, match="adaptive"):
            BudgetControl(**({"budget": 100, "least": 50, "most": 130} | bad))

"""Rejection and reweighting, by hand and against a loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives import (
    AGGREGATIONS,
    Correction,
    clipped_surrogate,
    correct,
    token_coefficients,
)

LEVELS = [None, "token", "sequence", "geometric"]


def test_sparse_rl_by_hand() -> None:
    ratios = torch.tensor([[1.0, 2.0, 0.5], [1.0, 1e-5, 7.0], [4.0, 1.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    found = correct(ratios.log(), torch.zeros(3, 3), mask)
    assert found.rejected.tolist() == [False, True, False]
    assert found.kept.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    # 1, 1.5, 0.5 and 1.5, 1 after truncation: mean 1.1.
    expected = torch.tensor([[1, 1.5, 0.5], [0, 0, 0], [1.5, 1, 0]]) / 1.1
    torch.testing.assert_close(found.weights, expected)
    torch.testing.assert_close(found.raw[mask], ratios[mask])


def test_levels_by_hand() -> None:
    ratios = torch.tensor([[2.0, 4.0, 1.0], [0.5, 0.5, 8.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()

    def weights(**given: Any) -> torch.Tensor:
        settings = {"reject": None, "weight_high": 100.0, "normalise": False}
        return correct(ratios.log(), torch.zeros(2, 3), mask, **(settings | given)).weights

    torch.testing.assert_close(
        weights(reweight="sequence"), torch.tensor([[8.0, 8, 8], [0.25, 0.25, 0]])
    )
    torch.testing.assert_close(
        weights(reweight="geometric"), torch.tensor([[2.0, 2, 2], [0.5, 0.5, 0]])
    )
    found = correct(
        ratios.log(), torch.zeros(2, 3), mask, reject="geometric", reject_below=0.6, reweight=None
    )
    assert found.rejected.tolist() == [False, True]
    assert found.weights.tolist() == [[1.0] * 3, [0.0] * 3]
    found = correct(
        ratios.log(), torch.zeros(2, 3), mask, reject="sequence", reject_above=7.9, reweight=None
    )
    assert found.rejected.tolist() == [True, False]
    found = correct(
        ratios.log(), torch.zeros(2, 3), mask, reject=None, weight_bounds="mask",
        weight_low=0.6, weight_high=3.0, normalise=False,
    )  # fmt: skip
    assert found.kept.tolist() == [[True, False, True], [False, False, False]]
    assert found.weights.tolist() == [[2.0, 0.0, 1.0], [0.0] * 3]
    assert not bool(found.rejected.any())


@pytest.mark.parametrize("reject", LEVELS)
@pytest.mark.parametrize("reweight", LEVELS)
def test_equal_policies_are_left_alone(reject: str | None, reweight: str | None) -> None:
    logs = -torch.rand(4, 6) * 20
    mask = torch.arange(6) < torch.tensor([6, 1, 0, 3])[:, None]
    found = correct(logs, logs.clone(), mask, reject=reject, reweight=reweight)
    assert torch.equal(found.kept, mask)
    assert torch.equal(found.weights, mask.float())


def test_long_rollouts_neither_overflow_nor_vanish_unseen() -> None:
    dense, sampled = torch.full((2, 4000), -1.0), torch.full((2, 4000), -1.0)
    dense[0] += 0.5
    dense[1] -= 0.5
    mask = torch.ones(2, 4000).bool()
    found = correct(dense, sampled, mask, reject="sequence", reweight="sequence")
    assert found.rejected.tolist() == [False, True]
    assert bool(torch.isfinite(found.raw).all() & torch.isfinite(found.weights).all())


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_padding_may_have_any_numbers(value: float) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    dense = torch.where(mask, -0.5, value)
    for level in ("token", "sequence", "geometric"):
        found = correct(dense, torch.where(mask, -0.6, value), mask, reject=level, reweight=level)
        assert torch.equal(found.kept, mask)
        assert bool(torch.isfinite(found.weights).all())
        assert bool((found.weights[mask] > 0.9).all())


def test_a_token_that_has_no_probability_at_all_is_rejected() -> None:
    dense = torch.tensor([[-1.0, float("-inf")], [-1.0, -1.0]])
    found = correct(dense, torch.full((2, 2), -1.0), torch.ones(2, 2).bool())
    assert found.rejected.tolist() == [True, False]
    torch.testing.assert_close(found.weights, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    reject=st.sampled_from(LEVELS),
    reweight=st.sampled_from(LEVELS),
    bounds=st.sampled_from(["truncate", "mask"]),
    normalise=st.booleans(),
)
def test_against_a_loop(
    seed: int, reject: str | None, reweight: str | None, bounds: str, normalise: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, width = 5, 6
    logs = torch.randn(rows, width, generator=generator) * 1.5
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)
    low, high, wlow, whigh = 0.1, 30.0, 0.4, 2.0
    found = correct(
        logs, torch.zeros(rows, width), mask, reject=reject, reject_below=low, reject_above=high,
        reweight=reweight, weight_bounds=bounds, weight_low=wlow, weight_high=whigh,
        normalise=normalise,
    )  # fmt: skip

    def ratios(row: int, level: str) -> list[float]:
        mine = [float(logs[row, i]) for i in range(width) if mask[row, i]]
        if level == "token":
            return [math.exp(log) for log in mine]
        total = sum(mine) if level == "sequence" else sum(mine) / max(1, len(mine))
        return [math.exp(total)] * len(mine)

    kept, weights = [], []
    for row in range(rows):
        out = reject is not None and any(not low <= x <= high for x in ratios(row, reject))
        assert bool(found.rejected[row]) == out
        for value in ratios(row, reweight or "token"):
            inside = bounds == "truncate" or reweight is None or wlow <= value <= whigh
            stays = not out and inside
            kept.append(stays)
            weight = 1.0 if reweight is None else min(max(value, wlow), whigh)
            weights.append(weight if stays else 0.0)
    if normalise and reweight is not None and any(kept):
        mean = sum(weights) / sum(kept)
        weights = [weight / mean for weight in weights]
    assert found.kept[mask].tolist() == kept
    torch.testing.assert_close(found.weights[mask], torch.tensor(weights), atol=1e-5, rtol=1e-4)
    assert not bool(found.kept[~mask].any())
    assert float(found.weights[~mask].abs().sum()) == 0.0


def test_what_makes_no_sense_is_refused() -> None:
    logs, mask = torch.zeros(1, 2), torch.ones(1, 2).bool()
    for given_, message in (
        ({"reject": "row"}, "reject='row'"),
        ({"reweight": "row"}, "reweight='row'"),
        ({"weight_bounds": "drop"}, "weight_bounds='drop'"),
        ({"reject_below": 2.0, "reject_above": 1.0}, "bounds of reject"),
        ({"weight_low": 2.0}, "bounds of weight"),
    ):
        with pytest.raises(ValueError, match=message):
            correct(logs, logs, mask, **given_)


def _loss_and_gradient(
    found: Correction, start: torch.Tensor, old: torch.Tensor, aggregation: str
) -> tuple[float, torch.Tensor]:
    """Of a step, as the trainer takes it."""
    logprobs = start.clone().requires_grad_()
    advantages = torch.linspace(1, -1, len(start))
    losses = clipped_surrogate(logprobs, old, advantages).loss * found.weights
    coefficients = token_coefficients(found.kept, aggregation, longest=start.shape[1])
    loss = (torch.where(found.kept, losses, 0.0) * coefficients).sum()
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lost", [-50.0, -200.0, -math.inf, math.nan])
def test_an_all_rejected_batch_has_no_loss_and_no_gradient(aggregation: str, lost: float) -> None:
    sampled, mask = torch.full((2, 3), -1.0), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    dense = sampled.clone()
    dense[:, 1] = lost
    # One epoch on, the learner may find what was rejected likely.
    for start in (dense, sampled):
        for level in LEVELS:
            found = correct(dense, sampled, mask, reweight=level)
            assert found.rejected.tolist() == [True, True]
            assert not bool(found.weights.any())
            loss, gradient = _loss_and_gradient(found, start, dense, aggregation)
            assert loss == 0.0
            assert not bool(gradient.any())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rejected_row_does_not_spoil_the_others(aggregation: str) -> None:
    dense = torch.tensor([[-1.0, -2.0, -1.5], [-1.0, -math.inf, -1.0]])
    sampled = torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3).bool()
    start = torch.tensor([[-1.1, -2.0, -1.5], [-1.0, -1.0, -1.0]])
    both = correct(dense, sampled, mask)
    alone = correct(dense[:1], sampled[:1], mask[:1])
    loss, gradient = _loss_and_gradient(both, start, dense, aggregation)
    expected, slope = _loss_and_gradient(alone, start[:1], dense[:1], aggregation)
    assert loss == pytest.approx(expected)
    torch.testing.assert_close(gradient[:1], slope)
    assert gradient[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_without_evictions_every_correction_is_the_identity(aggregation: str) -> None:
    torch.manual_seed(0)
    sampled, mask = -torch.rand(4, 6) * 9, torch.arange(6) < torch.tensor([6, 1, 0, 3])[:, None]
    start = sampled + torch.randn(4, 6) * 0.2
    off = correct(sampled, sampled, mask, reject=None, reweight=None)
    expected = _loss_and_gradient(off, start, sampled, aggregation)
    for reject in LEVELS:
        for reweight in LEVELS:
            for bounds in ("truncate", "mask"):
                found = correct(
                    sampled, sampled, mask, reject=reject, reweight=reweight, weight_bounds=bounds
                )
                loss, gradient = _loss_and_gradient(found, start, sampled, aggregation)
                assert loss == expected[0]
                assert torch.equal(gradient, expected[1])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_without_an_upper_bound_survive_the_normalisation(level: str) -> None:
    # The sum of many ratios beyond float32 would be inf, and every weight 0.
    sampled, mask = torch.full((2000, 50), -1e3), torch.ones(2000, 50).bool()
    found = correct(torch.zeros(2000, 50), sampled, mask, reweight=level, weight_high=math.inf)
    assert bool(found.weights.isfinite().all())
    assert float(found.weights.mean()) == pytest.approx(1.0, rel=1e-4)
    assert bool(found.raw.square().sum().isfinite())


def test_weights_that_all_vanish_stay_finite() -> None:
    mask = torch.ones(1, 300).bool()
    found = correct(
        torch.full((1, 300), -2.0), torch.full((1, 300), -1.0), mask, reject=None,
        reweight="sequence",
    )  # fmt: skip
    assert not bool(found.weights.any())


def test_masking_compares_ratios_of_any_size() -> None:
    logs = torch.tensor([[0.0, 30.0, 60.0]])
    found = correct(
        logs, torch.zeros(1, 3), torch.ones(1, 3).bool(), weight_bounds="mask",
        weight_high=math.exp(40),
    )  # fmt: skip
    assert found.kept.tolist() == [[True, True, False]]


def test_bounds_are_inclusive_at_1() -> None:
    logs, mask = torch.full((1, 3), -2.0), torch.ones(1, 3).bool()
    bounds = {"reject_below": 1.0, "reject_above": 2.0, "weight_low": 1.0}
    found = correct(logs, logs, mask, weight_bounds="mask", **bounds)
    assert found.weights.tolist() == [[1.0] * 3]


def test_half_precision_is_computed_in_single_and_carries_no_gradient() -> None:
    dense = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    sampled = torch.tensor([[-1.5, -1.75]], dtype=torch.bfloat16)
    found = correct(dense, sampled, torch.ones(1, 2).bool(), normalise=False)
    assert found.weights.dtype == torch.float32
    assert not found.weights.requires_grad
    torch.testing.assert_close(found.weights, torch.tensor([[1.5, math.exp(-0.25)]]))
    empty = correct(dense[:0], sampled[:0], torch.ones(0, 2).bool())
    assert empty.weights.shape == (0, 2)
    for level in LEVELS:
        none = correct(dense, sampled, torch.zeros(1, 2).bool(), reject=level, reweight=level)
        assert not bool(none.kept.any() | none.rejected.any() | none.weights.any())


def test_parts_over_processes_are_the_whole() -> None:
    torch.manual_seed(0)
    dense, sampled = -torch.rand(2, 6, 5) * 2
    mask = torch.arange(5) < torch.tensor([5, 2, 0, 3, 4, 1])[:, None]
    whole = correct(dense, sampled, mask, reject_below=0.3)
    sums: list[torch.Tensor] = []
    for rows in (slice(0, 2), slice(2, 6)):
        correct(dense[rows], sampled[rows], mask[rows], reject_below=0.3,
                total=lambda value: sums.append(value) or value)  # fmt: skip
    answers = [sums[0] + sums[2], sums[1] + sums[3]]
    for rows in (slice(0, 2), slice(2, 6)):
        given_ = iter(answers)
        found = correct(
            dense[rows], sampled[rows], mask[rows], reject_below=0.3,
            total=lambda _, given_=given_: next(given_),
        )  # fmt: skip
        torch.testing.assert_close(found.weights, whole.weights[rows])

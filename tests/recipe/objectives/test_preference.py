"""Online DPO: one step by hand, pairs and loss against loops, places without a number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives import preference_loss, preference_pairs


def test_online_dpo_by_hand() -> None:
    pairs = preference_pairs(torch.tensor([0.5, 0.0, 1.0]), 3)
    assert pairs.tolist() == [[2, 1]]
    start = torch.tensor([[0.0, 0.0], [-1.0, -2.0], [-0.5, -1.5]])
    reference = torch.tensor([[0.0, 0.0], [-1.5, -2.0], [-1.0, -1.0]])
    logprobs = start.requires_grad_()
    rows = pairs.flatten()
    (loss,) = preference_loss(logprobs[rows], reference[rows], torch.ones(2, 2), beta=2.0)
    # The chosen one's log-ratio is 0.5 - 0.5, the other's 0.5: beta times their gap is -1.
    assert loss.item() == pytest.approx(math.log(1 + math.exp(1.0)))
    loss.backward()
    slope = 2.0 / (1 + math.exp(-1.0))
    assert logprobs.grad is not None
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([[0.0, 0.0], [slope, slope], [-slope, -slope]])
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), group=st.integers(2, 5), groups=st.integers(1, 4))
def test_pairs_against_a_loop(data: st.DataObject, group: int, groups: int) -> None:
    count = group * groups
    rewards = data.draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count))
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    found = preference_pairs(torch.tensor(rewards).float(), group, torch.tensor(kept))
    for number in range(groups):
        mine = [i for i in range(number * group, (number + 1) * group) if kept[i]]
        expected = [-1, -1]
        if len({rewards[i] for i in mine}) > 1:
            # Python's max and min take the first among equals too.
            expected = [max(mine, key=rewards.__getitem__), min(mine, key=rewards.__getitem__)]
        assert found[number].tolist() == expected


def test_rewards_that_are_no_numbers_make_no_pair() -> None:
    nan = math.nan
    assert preference_pairs(torch.tensor([1.0, nan, 0.0]), 3).tolist() == [[-1, -1]]
    kept = torch.tensor([True, False, True])
    assert preference_pairs(torch.tensor([1.0, nan, 0.0]), 3, kept).tolist() == [[0, 2]]
    infinite = torch.tensor([-math.inf, 1.0, 0.0])
    assert preference_pairs(infinite, 3).tolist() == [[1, 0]]
    assert preference_pairs(torch.full((3,), math.inf), 3).tolist() == [[-1, -1]]
    assert preference_pairs(torch.zeros(0), 3).shape == (0, 2)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), beta=st.sampled_from([0.01, 0.1, 2.0]))
def test_the_loss_against_a_loop(seed: int, beta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, reference, weights = torch.randn(3, 6, 5, generator=generator)
    weights = weights.clamp(min=0)
    logprobs.requires_grad_()
    found = preference_loss(logprobs, reference, weights, beta=beta)
    found.sum().backward()
    assert logprobs.grad is not None
    for pair in range(3):
        sums = []
        for row in (2 * pair, 2 * pair + 1):
            terms = zip(weights[row], logprobs[row], reference[row], strict=True)
            sums.append(sum(w.item() * (p.item() - q.item()) for w, p, q in terms))
        margin = beta * (sums[0] - sums[1])
        assert found[pair].item() == pytest.approx(math.log1p(math.exp(-margin)), rel=1e-4)
        slope = -beta / (1 + math.exp(margin))
        for row, sign in ((2 * pair, 1), (2 * pair + 1, -1)):
            torch.testing.assert_close(logprobs.grad[row], sign * slope * weights[row])


@pytest.mark.parametrize(
    ("new", "reference"),
    [
        (-math.inf, -1.0),
        (-1.0, -math.inf),
        (-math.inf, -math.inf),
        (math.nan, -1.0),
        (-1.0, math.nan),
    ],
)
def test_a_place_of_weight_0_has_no_gradient(new: float, reference: float) -> None:
    logprobs = torch.tensor([[-1.0, new], [-2.0, -2.0]], requires_grad=True)
    fixed = torch.tensor([[-1.5, reference], [-1.5, -2.0]])
    (loss,) = preference_loss(logprobs, fixed, torch.tensor([[1.0, 0], [1, 1]]), beta=1.0)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1.0)))
    loss.backward()
    slope = 1 / (1 + math.exp(1.0))
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-slope, 0.0], [slope, slope]]))


def test_a_pair_of_which_nothing_counts_is_a_draw() -> None:
    logprobs = torch.full((2, 3), -math.inf).requires_grad_()
    (loss,) = preference_loss(logprobs, torch.zeros(2, 3), torch.zeros(2, 3), beta=0.1)
    assert loss.item() == pytest.approx(math.log(2))
    loss.backward()
    assert logprobs.grad is not None
    assert not bool(logprobs.grad.any())


def test_long_rollouts_and_half_precision() -> None:
    for sign in (1.0, -1.0):
        rows = torch.tensor([[sign], [-sign]]).expand(2, 16_000).bfloat16()
        logprobs = rows.clone().requires_grad_()
        (loss,) = preference_loss(logprobs, torch.zeros_like(rows), torch.ones(2, 16_000), beta=1.0)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(0.0 if sign > 0 else 32_000.0)
        assert logprobs.grad is not None
        assert bool(logprobs.grad.isfinite().all())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="group=1 is too small"):
        preference_pairs(torch.zeros(4), 1)
    with pytest.raises(ValueError, match="group=3 does not divide"):
        preference_pairs(torch.zeros(4), 3)

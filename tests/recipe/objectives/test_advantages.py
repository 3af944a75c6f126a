"""Advantages, by hand and against a loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives import group_advantages


def test_grpo_by_hand() -> None:
    # Mean 0.5, deviation sqrt(4 * 0.25 / 3).
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    deviation = math.sqrt(1 / 3)
    found = group_advantages(rewards, 4)
    expected = torch.tensor([0.5, -0.5, 0.5, -0.5]) / (deviation + 1e-4)
    torch.testing.assert_close(found, expected)
    found = group_advantages(rewards, 4, divide_by_std=False)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 0.5, -0.5]))


def test_leave_one_out_by_hand() -> None:
    rewards = torch.tensor([3.0, 0.0, 0.0])
    found = group_advantages(rewards, 3, baseline="leave_one_out", divide_by_std=False)
    torch.testing.assert_close(found, torch.tensor([3.0, -1.5, -1.5]))


def test_a_rollout_that_left_takes_no_part() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 1.0])
    kept = torch.tensor([True, True, False, True])
    found = group_advantages(rewards, 4, divide_by_std=False, kept=kept)
    torch.testing.assert_close(found, torch.tensor([1 / 3, -2 / 3, 0.0, 1 / 3]))
    alone = torch.tensor([True, False, False, False])
    assert group_advantages(rewards, 4, kept=alone).tolist() == [0.0] * 4
    nobody = torch.zeros(4, dtype=torch.bool)
    assert group_advantages(rewards, 4, kept=nobody).tolist() == [0.0] * 4


def test_equal_rewards_leave_exactly_nothing() -> None:
    for value in (0.1, 1 / 3, 1e6 + 0.1):
        found = group_advantages(torch.full((6,), value), 3)
        assert found.tolist() == [0.0] * 6


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    group=st.integers(2, 5),
    groups=st.integers(1, 4),
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    divide=st.booleans(),
)
def test_against_a_loop(
    data: st.DataObject, group: int, groups: int, baseline: str, divide: bool
) -> None:
    count = group * groups
    values = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    found = group_advantages(
        torch.tensor(values, dtype=torch.float32),
        group,
        baseline=baseline,
        divide_by_std=divide,
        kept=torch.tensor(kept),
    )
    for number in range(count):
        first = number // group * group
        mine = [values[i] for i in range(first, first + group) if kept[i]]
        expected = 0.0
        if kept[number] and len(set(mine)) > 1:
            mean = sum(mine) / len(mine)
            expected = values[number] - mean
            if baseline == "leave_one_out":
                expected = values[number] - (sum(mine) - values[number]) / (len(mine) - 1)
            if divide:
                variance = sum((value - mean) ** 2 for value in mine) / (len(mine) - 1)
                expected /= math.sqrt(variance) + 1e-4
        assert float(found[number]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="group=1"):
        group_advantages(torch.zeros(4), 1)
    with pytest.raises(ValueError, match="group=3 does not divide"):
        group_advantages(torch.zeros(4), 3)
    with pytest.raises(ValueError, match="baseline='median'"):
        group_advantages(torch.zeros(4), 2, baseline="median")


def test_equal_rewards_in_double_precision_leave_exactly_nothing() -> None:
    # Their sum rounds, so that its mean is not quite theirs.
    for value in (1e6 + 0.1, 1e12 + 0.1, 0.1):
        rewards = torch.full((21,), value, dtype=torch.float64)
        for baseline in ("mean", "leave_one_out"):
            assert group_advantages(rewards, 7, baseline=baseline).tolist() == [0.0] * 21


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_without_a_number_spoils_its_group_alone(value: float) -> None:
    rewards = torch.tensor([1.0, value, 0.0, 1.0, 0.0, 0.0])
    found = group_advantages(rewards, 3, divide_by_std=False)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.0, 2 / 3, -1 / 3, -1 / 3]))
    kept = torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    found = group_advantages(rewards, 3, divide_by_std=False, kept=kept)
    torch.testing.assert_close(found, torch.tensor([0.5, 0.0, -0.5, 2 / 3, -1 / 3, -1 / 3]))


def test_half_precision_and_no_rollouts() -> None:
    rewards = torch.tensor([1.0, 0.0], dtype=torch.bfloat16)
    found = group_advantages(rewards, 2, divide_by_std=False)
    assert found.dtype == torch.float32
    assert found.tolist() == [0.5, -0.5]
    assert group_advantages(torch.zeros(0), 2).tolist() == []

"""Rewards that fail."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from sparse_cache.recipe.tasks.task import Example
from sparse_cache.recipe.verifiers import CountedReward, RewardError

EXAMPLE = Example("1 + 1?", "2", "sums.jsonl:7")


def returning(value: Any) -> CountedReward:
    return CountedReward(lambda example, completion: value)


def dividing(example: Example, completion: str) -> float:
    return 1.0 / len(completion)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (-2.0, -2.0),
        (np.float32(0.25), 0.25),
        (np.array([0.5]), 0.5),
        (torch.tensor(0.75), 0.75),
    ],
)
def test_numbers_pass(value: Any, reward: float) -> None:
    counted = returning(value)
    given = counted(EXAMPLE, "")
    assert given == reward and type(given) is float
    assert (counted.calls, counted.failures) == (1, 0)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "type NoneType"),
        ("1.0", "type str"),
        (1j, "type complex"),
        ([1.0], "type list"),
        (torch.ones(2), "type Tensor"),
        (float("nan"), "not finite"),
        (torch.tensor(float("nan")), "not finite"),
        (float("inf"), "not finite"),
        (10**400, "not finite"),
    ],
)
def test_what_is_no_reward_counts_as_zero(value: Any, kind: str) -> None:
    counted = returning(value)
    assert counted(EXAMPLE, "") == 0.0
    assert counted.kinds == {kind: 1}


def test_exceptions_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    counted = CountedReward(dividing)
    with caplog.at_level(logging.WARNING):
        rewards = [counted(EXAMPLE, text) for text in ("", "ab", "")]
    assert rewards == [0.0, 0.5, 0.0]
    assert (counted.calls, counted.failures, counted.kinds) == (3, 2, {"ZeroDivisionError": 2})
    assert len(caplog.records) == 1
    assert "'sums.jsonl:7' raised ZeroDivisionError" in caplog.text


def test_stopping_names_the_example() -> None:
    counted = CountedReward(dividing, stop=True)
    assert counted(EXAMPLE, "ab") == 0.5
    with pytest.raises(RewardError, match=r"'sums\.jsonl:7' raised ZeroDivisionError") as caught:
        counted(EXAMPLE, "")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(RewardError, match=r"'sums\.jsonl:7' returned nan\.$"):
        CountedReward(lambda example, completion: float("nan"), stop=True)(EXAMPLE, "")


def test_ctrl_c_is_no_failure() -> None:
    def interrupted(example: Example, completion: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CountedReward(interrupted)(EXAMPLE, "")


def test_threads_count_right() -> None:
    counted = CountedReward(dividing)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: counted(EXAMPLE, "a" * (number % 2)), range(2000)))
    assert (counted.calls, counted.failures) == (2000, 1000)

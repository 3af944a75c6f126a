"""The adaptive budget: its bounds, where it settles, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives.budget_control import BudgetControl


@settings(max_examples=60, deadline=None)
@given(
    tails=st.lists(st.floats(0, 2) | st.just(math.nan), max_size=20),
    budget=st.integers(10, 60),
    target=st.floats(0.01, 0.99),
    factor=st.floats(1.001, 3.0),
)
def test_it_moves_the_right_way_within_its_bounds(
    tails: list[float], budget: int, target: float, factor: float
) -> None:
    control = BudgetControl(budget, 10, 60, target=target, factor=factor)
    for tail in tails:
        before = control.budget
        after = control.update(tail)
        assert after == control.budget
        assert 10 <= after <= 60
        if tail < target:
            assert after > before or before == 60
        elif not tail > target + 1e-9:
            assert after == before
        else:
            assert after <= before


def test_it_settles_within_a_move_of_the_target() -> None:
    # A tail that rises with the budget reaches 0.86 at 860 and leaves the slack at 900.
    for start in (64, 4096):
        control = BudgetControl(start, 64, 4096)
        for _ in range(100):
            control.update(control.budget / 1000)
        assert all(860 / 1.11 < control.update(control.budget / 1000) < 900 * 1.11 for _ in "abcd")


def test_a_high_target_can_shrink_too() -> None:
    control = BudgetControl(100, 50, 200, target=0.98)
    assert control.update(0.985) == 100
    assert control.update(0.995) == 91


def test_a_tail_without_a_number_moves_nothing() -> None:
    control = BudgetControl(100, 50, 200)
    assert control.update(math.nan) == 100
    assert control.update(math.inf) == 91
    assert control.update(-math.inf) == 100


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"target": 0.0}, "adaptive_target=0.0"),
        ({"target": math.nan}, "adaptive_target=nan"),
        ({"factor": math.nan}, "adaptive_factor=nan"),
        ({"factor": math.inf}, "adaptive_factor=inf"),
        ({"slack": -0.1}, "adaptive_slack=-0.1"),
        ({"least": 0}, "adaptive_least=0"),
        ({"budget": 201}, "budget=201 must lie between adaptive_least=50 and adaptive_most=200"),
    ],
)
def test_what_makes_no_sense_is_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BudgetControl(**({"budget": 100, "least": 50, "most": 200} | bad))

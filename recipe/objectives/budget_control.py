"""An adaptive budget, which holds the mismatch between sampler and learner at a target."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class BudgetControl:
    """Moves the budget so that the 5th percentile of `xi` stays near a target.

    The lower tail of the dense/sparse ratio, not its mean, foretells a collapse
    (https://arxiv.org/abs/2606.08446): when the tail falls under the target the budget grows by
    `factor`; when it lies above the target by more than `slack`, or by more than half of what is
    left up to 1, it shrinks by `factor`. A tail that is no number moves nothing.

    Args:
        budget: tokens to begin with.
        least, most: bounds of the budget.
        target: of the 5th percentile of `xi`, in (0, 1).
        factor: of one move, above 1.
        slack: how far above the target nothing is done, 0 or above.

    Raises:
        ValueError: a value out of its range.
    """

    budget: int
    least: int
    most: int
    target: float = 0.86
    factor: float = 1.1
    slack: float = 0.04

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ValueError(f"adaptive_target={self.target} must lie between 0 and 1.")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"adaptive_factor={self.factor} must be above 1 and finite.")
        if not self.slack >= 0:
            raise ValueError(f"adaptive_slack={self.slack} must not be negative.")
        if self.least < 1:
            raise ValueError(f"adaptive_least={self.least} must be at least 1.")
        if not self.least <= self.budget <= self.most:
            raise ValueError(
                f"budget={self.budget} must lie between adaptive_least={self.least} and "
                f"adaptive_most={self.most}."
            )

    def update(self, tail: float) -> int:
        """The budget of the next step, given the 5th percentile of `xi` in this one."""
        # `xi` hardly exceeds 1 in the lower tail: without the half, a high target never shrinks.
        enough = min(self.target + self.slack, (self.target + 1) / 2)
        if tail < self.target:
            self.budget = min(self.most, max(self.budget + 1, round(self.budget * self.factor)))
        elif tail > enough:
            self.budget = max(self.least, min(self.budget - 1, round(self.budget / self.factor)))
        return self.budget

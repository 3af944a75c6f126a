"""PyramidKV: much for the first layers, little for the last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import ClassVar

from .base import BudgetAllocator, register_allocator


@register_allocator("pyramid")
@dataclass(frozen=True)
class PyramidAllocator(BudgetAllocator):
    """Budgets that fall linearly from the first budgeted layer to the last.

    Lower layers spread their attention over many tokens, higher ones gather it on few. As
    published, what is shared out lies beyond the tokens that are always kept (window and sinks):
    the last layer gets `1 / beta` of the mean, the first `2 - 1 / beta`. In whole tokens the rest
    goes to the layers that were rounded down most, so budgets add up exactly to `layers * budget`.

    A budget that is a share is scaled as a whole, layer by layer.

    Raises:
        ValueError: `beta` is not a number of at least 1.
    """

    varies_by_layer: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"

    beta: float = 20.0
    """How steep: the mean is `beta` times what the last layer gets. 1 is uniform."""

    def __post_init__(self) -> None:
        beta = self.beta
        if isinstance(beta, bool) or not isinstance(beta, Real) or not 1 <= beta < math.inf:
            raise ValueError(f"beta must be a number of at least 1, got {beta!r}.")

    def check_budget(self, budget: int | float) -> None:
        """Refuse a share that would give the first layer more tokens than there are.

        Raises:
            ValueError: it would.
        """
        most = 2 - 1 / float(self.beta)
        if not isinstance(budget, int) and budget * most >= 1:
            raise ValueError(
                f"budget={budget} with allocation='pyramid' gives the first layer {most:.3g} times "
                f"that share, which is more than all tokens; pass a share below {1 / most:.3g}, a "
                "number of tokens, or PyramidAllocator with a smaller beta."
            )

    def layer_budgets(
        self, budget: int | float, layers: int, protected: int
    ) -> list[int] | list[float]:
        """See `BudgetAllocator.layer_budgets`; never rises from a layer to the next."""
        least = 1 / Fraction(self.beta)
        factors = [
            2 - least - (2 - 2 * least) * Fraction(index, max(layers - 1, 1))
            for index in range(layers)
        ]
        if layers == 1:
            factors = [Fraction(1)]
        if not isinstance(budget, int):
            return [budget * float(factor) for factor in factors]
        exact = [(budget - protected) * factor for factor in factors]
        budgets = [math.floor(each) for each in exact]
        missing = layers * (budget - protected) - sum(budgets)
        rounded_down_most = sorted(range(layers), key=lambda i: budgets[i] - exact[i])
        for index in rounded_down_most[:missing]:
            budgets[index] += 1
        return [protected + each for each in budgets]

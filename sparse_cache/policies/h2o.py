"""H2O: heavy hitters, the tokens that drew most attention so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import EvictionPolicy, LayersView, PolicyView, register_policy


@register_policy("h2o")
@dataclass(frozen=True)
class H2OPolicy(EvictionPolicy):
    """Keep the tokens with the most attention received since they were stored.

    The paper sums attention over all queries. An old token has then been summed over more queries
    than a new one and wins whatever its rate, so by default the sum is divided by the number of
    queries that could see the token: the mean attention it draws per query.

    The paper spends half its budget on the most recent tokens; that is
    `SparseBudgetCache(budget=B, window=B // 2, policy="h2o")`.

    Raises:
        ValueError: `normalize` is not a bool.
    """

    needs_attention_mass: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"

    normalize: bool = True
    """Divide by the queries that could see the token. False gives the paper's plain sum."""

    def __post_init__(self) -> None:
        if not isinstance(self.normalize, bool):
            raise ValueError(f"normalize must be True or False, got {self.normalize!r}.")

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return the attention received, per query or in sum, float32 `[B, H, S]`.

        Raises:
            ValueError: the view carries no attention mass.
        """
        if view.attention_mass is None:
            raise ValueError(
                "policy 'h2o' needs view.attention_mass, got None; fill it in for policies whose "
                "needs_attention_mass is True."
            )
        mass = view.attention_mass.float()
        if not self.normalize:
            return mass
        # A token is seen by the query of its own position and by every later one.
        return mass / (view.seen[:, None, None] - view.positions).float()

    def score_layers(self, view: LayersView) -> torch.Tensor:
        """The same scores for all layers at once, float32 `[L, B, H, S]`.

        Raises:
            ValueError: the view carries no attention mass.
        """
        if view.attention_mass is None:
            raise ValueError("policy 'h2o' needs view.attention_mass, got None.")
        mass = view.by_sequence(view.attention_mass)
        if not self.normalize:
            return mass
        # Beyond a row's length there is no position to divide by.
        queries = (view.seen.unsqueeze(-1) - view.stacked_positions()).clamp_(min=1)
        return mass.div_(queries.float())

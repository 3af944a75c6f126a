"""SnapKV: what the observation window attends to stays, with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..kernels.window_importance import window_importance
from ._observation import (
    GROUP_REDUCTIONS,
    POOLINGS,
    attention_probabilities,
    check_choice,
    check_kernel_size,
    grouped_queries,
    older_than_window,
    pool,
    required_queries,
)
from .base import EvictionPolicy, LayersView, PolicyView, register_policy


@register_policy("snapkv")
@dataclass(frozen=True)
class SnapKVPolicy(EvictionPolicy):
    """Keep the tokens to which the last `window` queries attend most, smoothed over neighbours.

    Attention probabilities (causal, over all stored keys) of the last queries are averaged over
    the queries and pooled along the older keys. The paper compresses the prompt once and scores
    each query head by itself; here each eviction scores again, and the query heads of a group,
    which share a key, are reduced to one score.

    Raises:
        ValueError: an option is out of its range.
    """

    needs_queries: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"

    kernel_size: int = 5
    """Width of the pooling; odd, 1 for none."""
    pooling: str = "avg"
    """"avg" or "max"."""
    group_reduction: str = "mean"
    """"mean" or "max" over the query heads of a group, after the softmax."""

    def __post_init__(self) -> None:
        check_kernel_size(self.kernel_size)
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("group_reduction", self.group_reduction, GROUP_REDUCTIONS)

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return the pooled attention, float32 `[B, H, S]`; 0 for the window itself.

        Raises:
            ValueError: the view carries no query.
        """
        attention = attention_probabilities(grouped_queries(view, self.name), view).mean(dim=3)
        attention = attention.amax(2) if self.group_reduction == "max" else attention.mean(2)
        older = attention[..., : attention.shape[-1] - view.window]
        return F.pad(pool(older, self.kernel_size, self.pooling), (0, view.window))

    def score_layers(self, view: LayersView) -> torch.Tensor:
        """The same scores for all layers at once, float32 `[L, B, H, S]`.

        Raises:
            ValueError: the view carries no query.
        """
        attention = window_importance(
            required_queries(view.queries, self.name),
            view.keys,
            view.order,
            view.lengths,
            view.stored,
            window=view.window,
            scaling=view.scaling,
            normalization="causal",
            group_reduction=self.group_reduction,
            key_scales=view.key_scales,
            implementation=view.implementation,
        )
        older = older_than_window(attention, view)
        return pool(older.flatten(0, 1), self.kernel_size, self.pooling).view(older.shape)

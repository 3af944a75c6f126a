"""TOVA: what the newest query attends to stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..kernels.window_importance import window_importance
from ._observation import attention_probabilities, grouped_queries, required_queries
from .base import EvictionPolicy, LayersView, PolicyView, register_policy


@register_policy("tova")
@dataclass(frozen=True)
class TOVAPolicy(EvictionPolicy):
    """Keep the tokens to which the newest query attends most.

    The paper averages over all query heads of a layer, so that all its heads keep the same tokens,
    and evicts one token a step; here `interval` tokens go at once, and the cache's `window` and
    `sinks` are kept besides.

    Raises:
        ValueError: `share_heads` is not a bool.
    """

    needs_queries: ClassVar[bool] = True
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"

    share_heads: bool = True
    """Average over all heads of the layer. False averages over each KV head's own query heads."""

    def __post_init__(self) -> None:
        if not isinstance(self.share_heads, bool):
            raise ValueError(f"share_heads must be True or False, got {self.share_heads!r}.")

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return the newest query's attention to each token, float32 `[B, H, S]`.

        Raises:
            ValueError: the view carries no query.
        """
        newest = grouped_queries(view, self.name)[:, :, :, -1:]
        scores = attention_probabilities(newest, view).squeeze(3).mean(dim=2)
        if self.share_heads:
            return scores.mean(dim=1, keepdim=True).expand_as(scores)
        return scores

    def score_layers(self, view: LayersView) -> torch.Tensor:
        """The same scores for all layers at once, float32 `[L, B, H, S]`.

        Raises:
            ValueError: the view carries no query.
        """
        scores = window_importance(
            [each[:, :, -1:] for each in required_queries(view.queries, self.name)],
            view.keys,
            view.order,
            view.lengths,
            view.stored,
            window=view.window,
            scaling=view.scaling,
            normalization="causal",
            key_scales=view.key_scales,
            implementation=view.implementation,
        )
        if self.share_heads:
            return scores.mean(dim=2, keepdim=True).expand_as(scores).contiguous()
        return scores

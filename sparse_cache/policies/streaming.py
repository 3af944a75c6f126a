"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import EvictionPolicy, LayersView, PolicyView, register_policy


@register_policy("streaming")
@dataclass(frozen=True)
class StreamingPolicy(EvictionPolicy):
    """Keep the first `sinks` tokens and the most recent others.

    The sinks are the cache's own protection (`SparseBudgetCache(sinks=4)`); the score is pure
    recency. The paper renumbers positions inside its cache; here a token keeps the position that
    it has in the sequence.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return minus the age of each token, float32 `[B, H, S]`; the newest scores -1."""
        # Ages rather than positions: float32 counts ages within a cache exactly, however long
        # the sequence has become.
        return (view.positions - view.seen[:, None, None]).float()

    def score_layers(self, view: LayersView) -> torch.Tensor:
        """The same scores for all layers at once, float32 `[L, B, H, S]`."""
        return (view.stacked_positions() - view.seen.unsqueeze(-1)).float()

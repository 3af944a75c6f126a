"""Pure recency: the newest tokens, sinks included in the forgetting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import EvictionPolicy, LayersView, PolicyView, register_policy


@register_policy("window")
@dataclass(frozen=True)
class WindowPolicy(EvictionPolicy):
    """Keep the most recent `budget` tokens and nothing else.

    The plain sliding window that StreamingLLM is measured against. It differs from `streaming` in
    one point: the first tokens are not protected (`keeps_sinks` is False), so they are forgotten
    like any other.
    """

    keeps_sinks: ClassVar[bool] = False
    paper: ClassVar[str] = "https://arxiv.org/abs/2004.05150"

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return minus the age of each token, float32 `[B, H, S]`; the newest scores -1."""
        # Ages rather than positions: float32 counts ages within a cache exactly, however long
        # the sequence has become.
        return (view.positions - view.seen[:, None, None]).float()

    def score_layers(self, view: LayersView) -> torch.Tensor:
        """The same scores for all layers at once, float32 `[L, B, H, S]`."""
        return (view.stacked_positions() - view.seen.unsqueeze(-1)).float()

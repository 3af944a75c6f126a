"""KeyDiff: keys that point away from the mean direction stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from .base import EvictionPolicy, PolicyView, register_policy


@register_policy("keydiff")
@dataclass(frozen=True)
class KeyDiffPolicy(EvictionPolicy):
    """Keep the keys least similar to the head's anchor.

    The anchor is the mean of a head's stored keys after each was scaled to length one; the score
    is minus the cosine similarity of a key with it. All stored tokens enter the anchor, the
    protected ones too.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2504.15364"

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return minus the cosine similarity with the anchor, float32 `[B, H, S]`."""
        directions = F.normalize(view.keys.float(), dim=-1)
        anchor = F.normalize(directions.mean(dim=2), dim=-1)
        return -(directions @ anchor[..., None]).squeeze(-1)

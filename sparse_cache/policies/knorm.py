"""Key norm: keys of small L2 norm attract attention, so they stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import EvictionPolicy, PolicyView, register_policy


@register_policy("knorm")
@dataclass(frozen=True)
class KNormPolicy(EvictionPolicy):
    """Keep the keys with the smallest L2 norm.

    The paper leaves its first two layers uncompressed in language modelling; here every layer has
    the same budget.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return minus the norm of each key, float32 `[B, H, S]`."""
        return -view.keys.float().norm(dim=-1)

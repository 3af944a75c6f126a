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

    A rotary embedding turns a key without changing its norm, so the norms of a repeated token
    differ by rounding alone; they are rounded to 12 bits, so that such tokens tie and the recent
    one stays, rather than one chosen by the order of a sum.

    The paper leaves its first two layers uncompressed in language modelling; here every layer has
    the same budget.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"

    def score(self, view: PolicyView) -> torch.Tensor:
        """Return minus the norm of each key, float32 `[B, H, S]`."""
        mantissa, exponent = torch.frexp(view.keys.float().norm(dim=-1))
        return -torch.ldexp((mantissa * 4096).round() / 4096, exponent)

"""What a plan of an eviction consists of."""

from __future__ import annotations

from typing import NamedTuple

import torch


def slot_dtype(stored: int) -> torch.dtype:
    """What the slots of a plan are kept in; half the bytes wherever they fit."""
    return torch.int16 if stored <= 2**15 else torch.int32


class HoleFilling(NamedTuple):
    """Which rows move where so that the survivors fill the first `keep` slots of every head."""

    sources: torch.Tensor
    """`[L, B, H, M]` int16 (int32 for S above 32768): slots that surviving tokens
    leave, all at or beyond `keep`; the first `moves` are valid and the rest are -1."""
    targets: torch.Tensor
    """Like `sources`: slots that they move to, all below `keep`."""
    moves: torch.Tensor
    """`[L, B, H]` int32: how many pairs are valid."""
    kept: torch.Tensor | None
    """`[L, B, H, K]` int32: the survivors' indices in the stored sequence, ascending. The first
    `min(keep, length)` are valid and the rest hold their own index. None unless it was recorded."""

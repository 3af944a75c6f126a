"""Bytes that an eviction moves and holds for a moment, counted from real plans.

Three ways to bring the survivors of all layers to the first slots of their heads: hole filling,
compaction in place, and gather-and-copy (`sparse_cache.storage.TokenStorage.compact`: a copy of the
kept tokens is made and written back, one layer and tensor after the other).

Counted are the rows of the stored tensors, and for each way its scores, indices and plan. Bytes
that a kernel reads again right away, from a cache of the GPU, are counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .types import HoleFilling

_INDEX = 4  # bytes of an int32 or a float32
_LONG = 8  # bytes of the int64 that torch.gather takes


class Traffic(NamedTuple):
    """Bytes of one eviction of all layers."""

    read: int
    written: int
    transient: int
    """The most that is allocated at one moment beyond what the cache holds anyway, scores
    included."""
    rows: int
    """How many of the bytes read and written belong to rows of the stored tensors."""

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written


def hole_filling_traffic(
    plan: HoleFilling,
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    stored: int,
    row_bytes: Sequence[int],
) -> Traffic:
    """Count `plan_hole_filling` and one `fill_holes` for each kind of row.

    Args:
        plan: as made.
        lengths, keep: `[L, B, H]` int32, as given to the plan.
        stored: S of the scores.
        row_bytes: bytes of a token in each stored tensor, such as those of a key and a value.
    """
    before, after = _tokens(lengths, keep)
    heads, pairs = plan.moves.numel(), plan.sources.numel()
    moves = int(plan.moves.sum())
    kept = 0 if plan.kept is None else plan.kept.numel() * _INDEX
    pair = 2 * plan.sources.element_size()
    written = pairs * pair + heads * _INDEX + kept
    rows = moves * sum(row_bytes)
    return Traffic(
        # Scores, positions and slots; lengths and limits; pairs and their number, for each kind.
        read=rows
        + 3 * before * _INDEX
        + 2 * heads * _INDEX
        + len(row_bytes) * (moves * pair + heads * _INDEX),
        written=rows + 2 * after * _INDEX + written,
        transient=heads * stored * _INDEX + written,
        rows=2 * rows,
    )


def compaction_traffic(
    kept: torch.Tensor,
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    stored: int,
    row_bytes: Sequence[int],
) -> Traffic:
    """Count `plan_compaction` and one `compact` for each kind of row, and one for positions.

    Args:
        kept: `[L, B, H, K]` int32 from `plan_compaction`.
        lengths, keep, stored, row_bytes: as for `hole_filling_traffic`.
    """
    before, after = _tokens(lengths, keep)
    own = torch.arange(kept.shape[3], device=kept.device)
    moves = int(((kept != own) & (own < keep.unsqueeze(-1))).sum())
    rows = moves * (sum(row_bytes) + _INDEX)
    kinds = len(row_bytes) + 1
    return Traffic(
        read=rows
        + 2 * before * _INDEX
        + 2 * kept[..., 0].numel() * _INDEX
        + kinds * (after + kept[..., 0].numel()) * _INDEX,
        written=rows + kept.numel() * _INDEX,
        transient=lengths.numel() * stored * _INDEX + kept.numel() * _INDEX,
        rows=2 * rows,
    )


def gather_and_copy_traffic(
    lengths: torch.Tensor, keep: torch.Tensor, *, stored: int, row_bytes: Sequence[int]
) -> Traffic:
    """Count a gather of the survivors and a copy back, layer by layer, tensor by tensor.

    Choosing them is counted as one reading of scores and positions and one writing of indices,
    which is less than a sort takes.

    Args:
        lengths, keep, stored, row_bytes: as for `hole_filling_traffic`.
    """
    before, after = _tokens(lengths, keep)
    largest = max(
        (_tokens(length, limit)[1] for length, limit in zip(lengths, keep, strict=True)), default=0
    )
    rows = after * (sum(row_bytes) + _INDEX)
    kinds = len(row_bytes) + 1
    return Traffic(
        read=2 * rows + 2 * before * _INDEX + kinds * after * _LONG,
        written=2 * rows + after * _LONG,
        transient=largest * (max(row_bytes) + _LONG)
        + (lengths[0].numel() * stored * _INDEX if len(lengths) else 0),
        rows=4 * rows,
    )


def _tokens(lengths: torch.Tensor, keep: torch.Tensor) -> tuple[int, int]:
    """Tokens before and after in the heads that evict any."""
    evicting = keep < lengths
    return int(lengths[evicting].sum()), int(keep[evicting].sum())

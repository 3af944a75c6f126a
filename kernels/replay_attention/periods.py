"""Cutting the queries of a row into blocks that see few keys.

A row evicts at some columns only. Between two of them a head sees a fixed set of older tokens, at
most `budget` of them if it has just evicted, and the columns since then.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

SHORTEST = 64
"""Queries below which a period is put together with the next one: small blocks are all overhead."""
LONGEST = 128
"""Queries above which a period is divided. A block's older queries do not see its newer columns,
which is work for nothing, and the wider prefix of the later parts costs less than that."""


@dataclass(frozen=True)
class Block:
    """Queries `[start, stop)` of one row, and the keys that they see: a prefix and themselves."""

    row: int
    start: int
    stop: int
    prefix: torch.Tensor | slice
    """Columns before `start` that are alive there: `[H, W]` int64, ascending, filled up with `T`
    where a head has fewer; or a slice, where it is the same columns side by side for all heads."""
    is_causal: bool
    """Whether every query sees the whole prefix, and the own columns up to itself."""

    @property
    def width(self) -> int:
        """`W`, keys before the own columns."""
        if isinstance(self.prefix, slice):
            return int(self.prefix.stop - self.prefix.start)
        return self.prefix.shape[1]


def blocks_of(deaths: torch.Tensor) -> list[Block]:
    """The blocks of all rows, by row and column; columns before a row's first token have none.

    Args:
        deaths: `[B, H, T]` int32: the column from which a token is no longer visible; 0 for
            padding. Copied to the host, where the blocks are made.
    """
    on_host = deaths.detach().cpu().long()
    return [
        block
        for row, death in enumerate(on_host)
        for block in _blocks_of_row(row, death, deaths.device)
    ]


def _blocks_of_row(row: int, death: torch.Tensor, device: torch.device) -> list[Block]:
    heads, length = death.shape
    columns = torch.arange(length)
    real = (death > 0).any(0)
    first = int(real.int().argmax()) if bool(real.any()) else length
    evicts = torch.zeros(length + 1, dtype=torch.bool)
    evicts[death.clamp(max=length).flatten()] = True
    evicts[: first + 1] = False
    evicts[length] = False
    # A place behind the last column stands for "no token".
    ends = torch.nn.functional.pad(death, (0, 1))
    alive = torch.empty(heads, 0, dtype=torch.long)
    found, before = [], first
    for start, stop in cut(first, evicts.nonzero()[:, 0].tolist(), length):
        alive = torch.cat([alive, columns[before:start].expand(heads, -1)], dim=1)
        living = ends.gather(1, alive) > start
        alive, is_full = _keep(alive, living, nobody=length)
        own = ends[:, start:stop] > columns[start:stop]
        is_causal = is_full and bool(own.all()) and not bool(evicts[start + 1 : stop].any())
        prefix = _as_slice(alive) if is_full else None
        found.append(Block(row, start, stop, prefix or alive.to(device), is_causal))
        before = start
    return found


def cut(first: int, evictions: list[int], length: int) -> list[tuple[int, int]]:
    """Blocks `[start, stop)` that cover `[first, length)` and mostly begin at `evictions`."""
    found: list[tuple[int, int]] = []
    start = first
    for end in [*evictions, length]:
        if end == start or (end - start < SHORTEST and end < length):
            continue
        parts = math.ceil((end - start) / LONGEST)
        edges = [start + (end - start) * part // parts for part in range(parts + 1)]
        found += itertools.pairwise(edges)
        start = end
    return found


def _keep(columns: torch.Tensor, living: torch.Tensor, *, nobody: int) -> tuple[torch.Tensor, bool]:
    """Those of `columns` `[H, S]` that are `living`, in order, and whether all heads have equally
    many; the rest of the shorter ones is `nobody`."""
    counts = living.sum(1)
    width = int(counts.max()) if columns.shape[1] else 0
    is_full = bool((counts == width).all())
    if is_full:
        return columns[living].view(columns.shape[0], width), True
    order = living.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    kept = columns.gather(1, order)
    return kept.masked_fill(torch.arange(width) >= counts[:, None], nobody), False


def _as_slice(columns: torch.Tensor) -> slice | None:
    """The range that `columns` `[H, W]` are in every head, if they are one."""
    width = columns.shape[1]
    if width == 0:
        return slice(0, 0)
    first, last = int(columns[0, 0]), int(columns[0, -1])
    is_range = last - first + 1 == width and bool((columns == columns[:1]).all())
    return slice(first, last + 1) if is_range else None


def visible_pairs(deaths: torch.Tensor) -> int:
    """How many pairs of a query and a key it sees there are, over all rows and heads `[B, H, T]`.

    Of a dense causal forward it would be `T * (T + 1) / 2` for each.
    """
    length = deaths.shape[-1]
    columns = torch.arange(length, device=deaths.device)
    return int((deaths.long().clamp(max=length) - columns).clamp(min=0).sum())


def gathered_pairs(deaths: torch.Tensor) -> int:
    """How many pairs attention by period computes for that, over all rows and heads."""
    heads = deaths.shape[1]
    return heads * sum(
        (block.stop - block.start) * (block.width + block.stop - block.start)
        for block in blocks_of(deaths)
    )

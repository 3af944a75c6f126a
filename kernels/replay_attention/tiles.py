"""What the programs of the Triton kernels work on, made on the device of the deaths.

The host reads two small things: at which columns each row evicts, and how many keys are listed in
all. Everything as large as the deaths stays on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .periods import cut


class QueryBlocks(NamedTuple):
    """Blocks of queries and the keys that each sees before its own columns."""

    blocks: torch.Tensor
    """`[N, 4]` int32: row, first query, last query + 1, and the first column of a range of keys
    that ends at the first query; -1: the keys are listed."""
    starts: torch.Tensor
    """`[N, H]` int64: where the block's keys begin in `columns`, by head of the deaths."""
    counts: torch.Tensor
    """`[N, H]` int32: how many keys there are, listed or in the range."""
    columns: torch.Tensor
    """int32: the listed keys, ascending for each block and head."""


class KeyTiles(NamedTuple):
    """Keys that die at the same time, side by side."""

    columns: torch.Tensor
    """`[B, H, tiles * size]` int32: all columns of a row and head, ordered by death and then by
    column; `T` fills the last tile."""
    spans: torch.Tensor
    """`[B, H, tiles, 2]` int32: the first query that may see a key of the tile, and the last + 1.
    """


def query_blocks(deaths: torch.Tensor) -> QueryBlocks:
    """Blocks of all rows, which mostly begin at evictions.

    Args:
        deaths: `[B, H, T]` int32.
    """
    device, heads = deaths.device, deaths.shape[1]
    blocks = _cut_rows(deaths)
    if not blocks:
        none = torch.zeros(0, heads, dtype=torch.int32, device=device)
        return QueryBlocks(none.new_zeros(0, 4), none.long(), none, none.flatten())
    table = torch.tensor(blocks, dtype=torch.int32).to(device)
    start, first = table[:, 1, None], table[:, 3, None]
    column = torch.arange(deaths.shape[2], dtype=torch.int32, device=device)
    counts, columns = [], []
    for row in range(len(deaths)):
        mine = table[:, 0] == row
        begins = start[mine, :, None]
        # Ranges need no list; their keys would be most of those of a long prompt.
        alive = (column < begins) & (deaths[row] > begins) & (first[mine, :, None] < 0)
        counts.append(alive.sum(-1, dtype=torch.int32))
        columns.append(alive.nonzero()[:, 2].int())
    listed = torch.cat(counts)
    starts = (listed.flatten().cumsum(0) - listed.flatten()).view(-1, heads)
    counted = torch.where(first < 0, listed, start - first)
    return QueryBlocks(table, starts, counted.contiguous(), torch.cat(columns))


def _cut_rows(deaths: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Row, first query, last query + 1, and first key of the range (or -1) of each block."""
    batch, _, length = deaths.shape
    evicts = torch.zeros(batch, length + 1, dtype=torch.bool, device=deaths.device)
    evicts.scatter_(1, deaths.clamp(max=length).flatten(1).long(), True)
    both = torch.stack([evicts[:, :length], (deaths > 0).any(1)], dim=1).cpu()
    found = []
    for row, (evicting, real) in enumerate(both):
        if not bool(real.any()):
            continue
        first = int(real.int().argmax())
        evicting[: first + 1] = False
        evictions = evicting.nonzero()[:, 0].tolist()
        # Until something dies, all tokens so far are alive.
        whole = evictions[0] if evictions else length
        found += [
            (row, start, stop, first if start < whole else -1)
            for start, stop in cut(first, evictions, length)
        ]
    return found


def key_tiles(deaths: torch.Tensor, size: int) -> KeyTiles:
    """Tiles of `size` keys; their queries are the range from a tile's first key to its last death.

    Args:
        deaths: `[B, H, T]` int32.
        size: keys in a tile.
    """
    length = deaths.shape[2]
    ends = deaths.clamp(max=length)
    # Stable: among those that die together the older come first.
    ends, columns = ends.sort(dim=-1, stable=True)
    missing = -length % size
    ends = torch.nn.functional.pad(ends, (0, missing))
    columns = torch.nn.functional.pad(columns.int(), (0, missing), value=length)
    # Padding is seen by nobody: its tiles have no queries.
    begins = columns.masked_fill(ends == 0, length).unflatten(-1, (-1, size)).amin(-1)
    spans = torch.stack([begins, ends.unflatten(-1, (-1, size)).amax(-1)], dim=-1)
    return KeyTiles(columns.contiguous(), spans.int().contiguous())

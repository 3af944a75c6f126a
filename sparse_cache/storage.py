"""Preallocated per-token tensors of one layer, written and compacted in place."""

from __future__ import annotations

import torch

PREALLOCATED_TOKENS = 4096
"""Up to this many tokens are allocated at once; beyond it storage grows by doubling, so that a
budget set high "to be safe" costs nothing until it is used."""


class TokenStorage:
    """One tensor `[B, H, capacity, ...]` whose first slots along dim 2 hold tokens.

    Args:
        example: `[B, H, T, ...]`, gives batch, heads, trailing sizes, dtype and device.
        limit: tokens after which no further growth is expected.
        needed: tokens to have room for now.
    """

    def __init__(self, example: torch.Tensor, *, limit: int, needed: int) -> None:
        self.data = self._allocate(example, _capacity(0, needed, limit))

    @staticmethod
    def _allocate(example: torch.Tensor, capacity: int) -> torch.Tensor:
        shape = (*example.shape[:2], capacity, *example.shape[3:])
        return torch.zeros(shape, dtype=example.dtype, device=example.device)

    @property
    def capacity(self) -> int:
        return self.data.shape[2]

    def reserve(self, needed: int, *, limit: int) -> None:
        """Make room for `needed` tokens, keeping what is stored."""
        if needed <= self.capacity:
            return
        grown = self._allocate(self.data, _capacity(self.capacity, needed, limit))
        grown[:, :, : self.capacity] = self.data
        self.data = grown

    def shrink(self, capacity: int) -> None:
        """Give back what lies beyond `capacity` slots."""
        if self.capacity > capacity:
            self.data = self.data[:, :, :capacity].clone()

    def write(self, tokens: torch.Tensor, start: int) -> None:
        """Write `[B, H, T, ...]` at slots `start ..` of every row."""
        self.data[:, :, start : start + tokens.shape[2]] = tokens

    def write_ragged(self, token: torch.Tensor, slots: torch.Tensor) -> None:
        """Write one token `[B, H, 1, ...]` at a slot of its own in each row; slots `[B]` int64."""
        rows = torch.arange(slots.shape[0], device=slots.device)
        self.data[rows, :, slots] = token[:, :, 0]

    def replace(self, rows: torch.Tensor | None, tokens: torch.Tensor) -> None:
        """Overwrite the first slots of `rows` (None: of all rows) with `[b, H, N, ...]`."""
        if rows is None:
            self.data[:, :, : tokens.shape[2]] = tokens
        else:
            self.data[rows, :, : tokens.shape[2]] = tokens

    def compact(self, rows: torch.Tensor | None, kept: torch.Tensor) -> None:
        """Move the tokens at slots `kept` `[b, H, N]` (ascending) to the first N slots.

        The transient is one copy of the kept tokens of this tensor.
        """
        source = self.data if rows is None else self.data[rows]
        self.replace(rows, gather_tokens(source, kept))


def gather_tokens(source: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Pick tokens `kept` `[B, H, N]` of `[B, H, S, ...]` along dim 2."""
    if source.dim() == 3:
        return source.gather(2, kept)
    index = kept.unsqueeze(-1).expand(*kept.shape, source.shape[-1])
    return source.gather(2, index)


def _capacity(current: int, needed: int, limit: int) -> int:
    if needed > limit:
        return needed
    if limit <= PREALLOCATED_TOKENS:
        return limit
    return min(limit, max(needed, 2 * current, PREALLOCATED_TOKENS))

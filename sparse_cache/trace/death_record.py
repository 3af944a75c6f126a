"""Recording when tokens die, while a cache runs."""

from __future__ import annotations

import torch

from .eviction_trace import NEVER


class DeathRecord:
    """Deaths of one layer, by a token's index among the real tokens of its row."""

    def __init__(self, batch: int, heads: int, device: torch.device) -> None:
        self.data = torch.full((batch, heads, 0), NEVER, dtype=torch.int32, device=device)

    def evict(
        self, rows: torch.Tensor | None, positions: torch.Tensor, kept: torch.Tensor, *, at: int
    ) -> None:
        """Of the tokens at `positions` `[b, H, S]`, those at slots `kept` `[b, H, N]` live on.

        `at` is the number of columns seen, which is the first query that misses the others.
        """
        self._make_room(at)
        deaths = self.data if rows is None else self.data[rows]
        deaths.scatter_(2, positions.long(), at)
        deaths.scatter_(2, positions.gather(2, kept).long(), NEVER)
        if rows is not None:
            self.data[rows] = deaths

    def evict_some(
        self, rows: torch.Tensor, positions: torch.Tensor, gone: torch.Tensor, *, at: int
    ) -> None:
        """Those of the tokens at `positions` `[b, H, S]` die that are `gone` (a mask like them).

        Unlike with `evict`, heads may lose different numbers of tokens.
        """
        self._make_room(at)
        # The others are written to a column that is cut off again.
        deaths = torch.nn.functional.pad(self.data[rows], (0, 1))
        end = deaths.shape[2] - 1
        self.data[rows] = deaths.scatter_(2, positions.long().where(gone, end), at)[:, :, :end]

    def _make_room(self, columns: int) -> None:
        if self.data.shape[2] < columns:
            missing = max(columns - self.data.shape[2], self.data.shape[2])
            self.data = torch.nn.functional.pad(self.data, (0, missing), value=NEVER)

    def by_column(self, real: torch.Tensor | None, columns: int) -> torch.Tensor:
        """Deaths `[B, H, columns]`; `real` `[B, columns]` says which columns hold real tokens."""
        short = max(columns - self.data.shape[2], 0)
        deaths = torch.nn.functional.pad(self.data, (0, short), value=NEVER)[:, :, :columns]
        if real is None:
            return deaths
        real = real.to(deaths.device)
        index = (real.cumsum(-1) - 1).clamp(min=0)
        index = index.unsqueeze(1).expand(-1, deaths.shape[1], -1)
        return deaths.gather(2, index).masked_fill(~real.unsqueeze(1), 0)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; `rows` `[B']` int64."""
        self.data = self.data.index_select(0, rows.to(self.data.device))

"""The last queries of each row, for the policies that score by them."""

from __future__ import annotations

import torch


class QueryWindow:
    """Holds the last `size` queries of every row, oldest first.

    Padding queries never enter: `real` says how many queries at the end of a chunk are real.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fixed = False
        """Whether the queries stay in one tensor, for compiled graphs."""
        self.data: torch.Tensor | None = None

    def _put(self, data: torch.Tensor) -> None:
        if not self.fixed:
            self.data = data.clone()
            return
        if self.data is None or self.data.shape != data.shape:
            with torch.inference_mode(False):
                self.data = torch.empty(data.shape, dtype=data.dtype, device=data.device)
        self.data.copy_(data)

    def append(self, queries: torch.Tensor, real: list[int] | None) -> None:
        """Add a chunk of queries `[B, Hq, T, D]`; `real[b]` of row b's are real (None: all)."""
        queries = queries.detach()
        chunk = queries.shape[2]
        if real is None and chunk >= self.size:
            self._put(queries[:, :, chunk - self.size :])
            return
        if self.data is None:
            shape = (*queries.shape[:2], self.size, queries.shape[3])
            self.data = queries.new_zeros(shape)
        joined = torch.cat([self.data, queries], dim=2)
        if real is None:
            self._put(joined[:, :, chunk:])
            return
        # The newest `size` of [window | real part of the chunk], per row.
        new = torch.tensor(real, device=queries.device).view(-1, 1)
        index = torch.arange(self.size, device=queries.device) + new
        index = torch.where(index < self.size, index, index + chunk - new)
        index = index[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
        self._put(joined.gather(2, index))

    def drop_last(self, tokens: int) -> None:
        """Forget the newest `tokens` queries; the oldest slots become zeros."""
        if self.data is not None and tokens:
            self.data = torch.nn.functional.pad(
                self.data[:, :, : self.size - tokens], (0, 0, tokens, 0)
            )

    def resize(self, size: int) -> None:
        """Hold `size` queries from now on; those not seen yet are zeros."""
        if self.data is not None:
            # A negative pad cuts the oldest off.
            self.data = torch.nn.functional.pad(self.data, (0, 0, size - self.size, 0))
        self.size = size

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows; `rows` `[B']` int64."""
        if self.data is not None:
            self._put(self.data.index_select(0, rows.to(self.data.device)))

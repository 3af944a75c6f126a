"""`EvictionTrace`: what a cache evicted when, and how to cut and join such records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from .checks import check_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEVER = torch.iinfo(torch.int32).max
"""Death of a token that is still stored."""

_SIDES = ("left", "right")


@dataclass(frozen=True, eq=False)
class EvictionTrace:
    """When each token stopped being visible.

    Token `j` is visible to query `i` of the same row, layer and KV head when `j <= i < death[j]`,
    both counted in columns: steps along the batch's token axis, padding included.

    A trace is not changed: everything that cuts or joins returns a new one. Two traces are equal if
    they are the same object; to compare what they hold, compare their tensors.
    """

    deaths: list[torch.Tensor]
    """One `[B, H, T]` int32 tensor per budgeted layer: the column from which a token is no longer
    visible; `NEVER` if it still is; 0 for padding, which never was. `H` is 1 where a model stores
    one key for all heads."""
    layer_indices: list[int]
    """Index in the model of each entry of `deaths`."""
    tokens_seen: int
    """Columns `T` seen."""

    # ------------------------------------------------------------------ what it holds

    @property
    def batch_size(self) -> int:
        """Rows `B`."""
        return self.deaths[0].shape[0] if self.deaths else 0

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.deaths[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(death.nbytes for death in self.deaths)

    @property
    def real(self) -> torch.Tensor:
        """Which columns held tokens rather than padding: `[B, T]` boolean."""
        return self.deaths[0][:, 0] != 0

    def kept(self, layer: int, at: int) -> torch.Tensor:
        """Whether each token is stored after `at` columns: `[B, H, min(at, T)]` boolean.

        Args:
            layer: an entry of `deaths`.
            at: columns.
        """
        return self.deaths[layer][:, :, :at] > at

    def validate(self) -> None:
        """Check that a cache could have recorded this.

        Raises:
            TypeError: a tensor is not int32.
            ValueError: shapes differ, layer indices are not ascending, a token dies before it is
                seen or behind the end, or a column is padding for some heads only; the message
                says where.
        """
        check_trace(self.deaths, self.layer_indices, self.tokens_seen, never=NEVER)

    # ------------------------------------------------------------------ rows

    def select_rows(self, rows: torch.Tensor | Sequence[int]) -> EvictionTrace:
        """The trace of some rows, in the order given; a row may come twice.

        Args:
            rows: `[B']` indices, or `[B]` boolean.

        Raises:
            TypeError: `rows` are not whole numbers.
            ValueError: there is no such row.
        """
        try:
            rows = torch.as_tensor(rows, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"rows must be a list of row numbers, got {rows!r}.") from error
        if rows.numel() and (rows.is_floating_point() or rows.is_complex()):
            raise TypeError(f"rows must be whole numbers, got {rows.tolist()}.")
        if rows.dtype == torch.bool:
            if rows.shape != (self.batch_size,):
                raise ValueError(
                    f"rows is a mask of shape {list(rows.shape)} for {self.batch_size} rows."
                )
            rows = rows.nonzero()[:, 0]
        if rows.dim() != 1 or not rows.numel():
            raise ValueError(f"rows must be a list of at least one row, got {rows.tolist()}.")
        if int(rows.min()) < 0 or int(rows.max()) >= self.batch_size:
            raise ValueError(f"rows={rows.tolist()} must lie between 0 and {self.batch_size - 1}.")
        return self._map(lambda death: death.index_select(0, rows.long()))

    @classmethod
    def stack(cls, traces: Iterable[EvictionTrace], *, side: str = "left") -> EvictionTrace:
        """Rows of several rollouts of one model as one batch, padded to the longest.

        Each trace lacks the last sampled token of its sequences, which was never read. Padded on
        the left, all lack the last column. Padded on the right, a shorter one lacks a column inside
        of the batch; stack `trace.extend(1)` for sequences with all of their tokens.

        Args:
            traces: at least one, of the same layers and KV heads, on the same device.
            side: where the shorter ones are padded, `"left"` or `"right"`.

        Raises:
            TypeError: they are not traces.
            ValueError: no traces, or they are of different models.
        """
        if isinstance(traces, EvictionTrace) or not isinstance(traces, Iterable):
            raise TypeError(f"traces must be a list of traces, got {type(traces).__name__}.")
        traces = list(traces)
        if not traces:
            raise ValueError("traces is empty; pass at least one trace.")
        for number, trace in enumerate(traces):
            if not isinstance(trace, EvictionTrace):
                raise TypeError(
                    f"traces[{number}] must be an EvictionTrace, got {type(trace).__name__}."
                )
        first = traces[0]
        shape = [(index, death.shape[1]) for index, death in first._layers()]
        for number, trace in enumerate(traces):
            found = [(index, death.shape[1]) for index, death in trace._layers()]
            if found != shape:
                raise ValueError(
                    f"traces[{number}] has (layer, KV heads) {found}, but traces[0] has {shape}: "
                    "they are of different models."
                )
        length = max(trace.tokens_seen for trace in traces)
        padded = [trace.pad(length - trace.tokens_seen, side=side) for trace in traces]
        deaths = [
            torch.cat(layer) for layer in zip(*(trace.deaths for trace in padded), strict=True)
        ]
        return cls(deaths, list(first.layer_indices), length)

    # ------------------------------------------------------------------ columns

    def pad(self, columns: int, *, side: str = "left") -> EvictionTrace:
        """With so many columns of padding more.

        Args:
            columns: how many.
            side: `"left"` moves everything to the right, `"right"` adds behind.

        Raises:
            TypeError: not a whole number.
            ValueError: fewer than 0, or another side.
        """
        if side not in _SIDES:
            raise ValueError(f"side={side!r} must be 'left' or 'right'.")
        _check_whole(columns)
        if columns < 0:
            raise ValueError(f"columns={columns} must not be negative; truncate() shortens.")
        if side == "right":
            return self._map(lambda death: _padded(death, (0, columns), 0), columns)
        return self._map(
            lambda death: _padded(
                torch.where((death > 0) & (death < NEVER), death + columns, death), (columns, 0), 0
            ),
            columns,
        )

    def truncate(self, columns: int) -> EvictionTrace:
        """The first columns, as the cache would have recorded them: later deaths are still to come.

        Raises:
            TypeError: not a whole number.
            ValueError: not between 1 and `tokens_seen`.
        """
        _check_whole(columns)
        if not 1 <= columns <= self.tokens_seen:
            raise ValueError(f"columns={columns} must lie between 1 and {self.tokens_seen}.")

        def cut(death: torch.Tensor) -> torch.Tensor:
            death = death[:, :, :columns]
            return torch.where(death > columns, NEVER, death)

        return self._map(cut, columns - self.tokens_seen)

    def extend(self, columns: int) -> EvictionTrace:
        """With so many tokens more, in every row, which live on.

        Raises:
            TypeError: not a whole number.
            ValueError: fewer than 0.
        """
        _check_whole(columns)
        if columns < 0:
            raise ValueError(f"columns={columns} must not be negative; truncate() shortens.")
        return self._map(lambda death: _padded(death, (0, columns), NEVER), columns)

    def aligned_to(self, attention_mask: torch.Tensor) -> EvictionTrace:
        """The same rows where their tokens lie in another batch, such as one padded on the right.

        A row of the mask may have one token more than the trace (the last sampled one, which the
        cache never read), or fewer: then it is cut.

        Args:
            attention_mask: `[B, T']`, non-zero where the learner's batch has tokens.

        Raises:
            TypeError: the mask is not a tensor.
            ValueError: another number of rows, no columns, or a row has more tokens than the
                rollout.
        """
        if not isinstance(attention_mask, torch.Tensor):
            found = type(attention_mask).__name__
            raise TypeError(f"attention_mask must be a tensor, got {found}.")
        real, target = self.real, attention_mask.to(self.device) != 0
        if target.dim() != 2 or target.shape[0] != self.batch_size or not target.shape[1]:
            raise ValueError(
                f"attention_mask must be [{self.batch_size}, T] for this trace, got "
                f"{list(target.shape)}."
            )
        counts, wanted = real.sum(-1), target.sum(-1)
        if bool((wanted > counts + 1).any()):
            row = int((wanted > counts + 1).int().argmax())
            raise ValueError(
                f"attention_mask has {int(wanted[row])} tokens in row {row}, but the rollout read "
                f"{int(counts[row])}; only the last sampled token may be new."
            )
        length, device = target.shape[1], self.device
        rank = (target.cumsum(-1) - 1).clamp(min=0)
        # The column at which so many tokens of the row have been seen; the last place is waste.
        place = torch.full((len(target), self.tokens_seen + 3), NEVER, dtype=torch.int32)
        place = place.to(device)
        column = torch.arange(length, dtype=torch.int32, device=device).expand_as(rank)
        waste = torch.full_like(rank, place.shape[1] - 1)
        place.scatter_(1, torch.where(target, rank, waste), column)
        last = (target * (column + 1)).amax(-1, keepdim=True).int()
        place.scatter_(1, wanted[:, None], last)
        place[:, -1] = NEVER
        before = _padded(real.cumsum(-1), (1, 0), 0)
        order = real.int().argsort(dim=-1, descending=True, stable=True)
        is_new = torch.arange(self.tokens_seen + 1, device=device) >= counts[:, None]

        def move(death: torch.Tensor) -> torch.Tensor:
            def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
                return table[:, None].expand(-1, death.shape[1], -1).gather(2, index)

            # From columns to tokens of the row, and from those to the new columns.
            seen = look_up(before, death.clamp(max=self.tokens_seen).long())
            ends = look_up(place, seen).masked_fill(death == NEVER, NEVER)
            by_token = ends.gather(2, order[:, None].expand_as(ends))
            by_token = _padded(by_token, (0, 1), NEVER).masked_fill(is_new[:, None], NEVER)
            moved = by_token.gather(2, rank[:, None].expand(-1, death.shape[1], -1))
            return moved.masked_fill(~target[:, None], 0)

        return self._map(move, length - self.tokens_seen)

    # ------------------------------------------------------------------ elsewhere

    def to(self, device: torch.device | str) -> EvictionTrace:
        """The trace on another device."""
        return self._map(lambda death: death.to(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all; see [`load`][EvictionTrace.load].

        The file has 16 bits a token where lengths allow, else 32.

        Raises:
            OSError: it cannot be written; what was there before is still there.
            TypeError, ValueError: see `validate`.
        """
        from .files import save_trace

        save_trace(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvictionTrace:
        """Read a file that `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is not a trace, broken, or of a newer version of this library.
        """
        from .files import load_trace

        return load_trace(path)

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> Figure:
        """Draw which tokens are held until when, see `sparse_cache.plot.plot_kept_tokens`.

        Args:
            path: where to save the picture; None: nowhere.
            options: passed on.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from ..plot import plot_kept_tokens

        return plot_kept_tokens(self, path, **options)

    # ------------------------------------------------------------------ inside

    def _layers(self) -> list[tuple[int, torch.Tensor]]:
        return list(zip(self.layer_indices, self.deaths, strict=True))

    def _map(
        self, change: Callable[[torch.Tensor], torch.Tensor], columns: int = 0
    ) -> EvictionTrace:
        deaths = [change(death) for death in self.deaths]
        return replace(self, deaths=deaths, tokens_seen=self.tokens_seen + columns)

    def __repr__(self) -> str:
        heads = sorted({death.shape[1] for death in self.deaths})
        return (
            f"EvictionTrace(rows={self.batch_size}, tokens_seen={self.tokens_seen}, "
            f"layers={len(self.deaths)}, heads={heads[0] if len(heads) == 1 else heads}, "
            f"bytes={self.nbytes})"
        )


def _check_whole(columns: int) -> None:
    if isinstance(columns, bool) or not isinstance(columns, Integral):
        raise TypeError(f"columns must be an int, got {columns!r}; pass a whole number.")


def _padded(tensor: torch.Tensor, columns: tuple[int, int], value: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, columns, value=value)

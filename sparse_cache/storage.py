"""Preallocated per-token tensors of one layer, written and compacted in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch

PREALLOCATED_TOKENS = 4096
"""Up to this many tokens are allocated at once; beyond it storage grows by doubling, so that a
budget set high "to be safe" costs nothing until it is used."""


class TokenStorage:
    """Tensors `[B, H, capacity, ...]` by name, whose first slots along dim 2 hold tokens.

    All tensors hold the same tokens at the same slots. One with a single head where the others
    have several (an indexer's keys) follows the first head.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.fixed = False
        """Whether tensors are allocated whole and stay where they are, for compiled graphs."""
        self.order: torch.Tensor | None = None
        """`[B, H, capacity]` int32: the slot of the i-th oldest token; None: slot i. Apart from the
        others, because it comes and goes, which a compiled graph must not see."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor of that name, None if there is none."""
        return self._tensors.get(name)

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return next(iter(self._tensors.values())).shape[2]

    def reserve(self, needed: int, limit: int, examples: dict[str, torch.Tensor]) -> None:
        """Have room for `needed` tokens in a tensor for each of `examples` `[B, H, T, ...]`.

        Args:
            needed: tokens to have room for now.
            limit: tokens after which no further growth is expected.
            examples: give names, sizes, dtypes and devices of tensors that are not there yet.
        """
        for name, example in examples.items():
            old = self._tensors.get(name)
            if old is not None and needed <= old.shape[2]:
                continue
            capacity = _capacity(0 if old is None else old.shape[2], needed, limit)
            if self.fixed:
                capacity = max(needed, limit)
            shape = (*example.shape[:2], capacity, *example.shape[3:])
            # Tensors that stay for good are no tensors of inference mode, which could not be
            # written outside of it.
            with torch.inference_mode(torch.is_inference_mode_enabled() and not self.fixed):
                new = torch.zeros(shape, dtype=example.dtype, device=example.device)
            if old is not None:
                new[:, :, : old.shape[2]] = old
            self._tensors[name] = new
        if self.order is not None and self.order.shape[2] < self.capacity:
            missing = torch.arange(
                self.order.shape[2], self.capacity, dtype=torch.int32, device=self.order.device
            )
            added = missing.expand(*self.order.shape[:2], -1)
            self.order = torch.cat([self.order, added], dim=2)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        return tuple(self._tensors.values())

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take `tensor` `[B, H, capacity, ...]` as it is, in place of the one there may be."""
        self._tensors[name] = tensor

    def reserve_same(self, needed: int, limit: int) -> None:
        """Have room for `needed` tokens in the tensors that are there."""
        if needed > self.capacity:
            self.reserve(needed, limit, self._tensors)

    def shrink(self, capacity: int) -> None:
        """Give back what lies beyond `capacity` slots."""
        for name, tensor in self._tensors.items():
            if tensor.shape[2] > capacity:
                self._tensors[name] = tensor[:, :, :capacity].clone()
        if self.order is not None:
            self.order = self.order[:, :, :capacity].clone()

    def write(self, name: str, tokens: torch.Tensor, slot: int | torch.Tensor) -> None:
        """Write `[B, H, T, ...]` at slots `slot ..`, or one token a row at slots `[B]` int64."""
        tensor = self._tensors[name]
        if isinstance(slot, int):
            tensor[:, :, slot : slot + tokens.shape[2]] = tokens
        else:
            rows = torch.arange(slot.shape[0], device=slot.device)
            tensor[rows, :, slot] = tokens[:, :, 0]

    def replace(self, rows: torch.Tensor | None, tokens: dict[str, torch.Tensor]) -> None:
        """Overwrite the first slots of `rows` (None: of all rows) with tensors `[b, H, N, ...]`."""
        for name, new in tokens.items():
            if rows is None:
                self._tensors[name][:, :, : new.shape[2]] = new
            else:
                self._tensors[name][rows, :, : new.shape[2]] = new

    def compact(self, rows: torch.Tensor | None, kept: torch.Tensor) -> None:
        """Move the tokens at slots `kept` `[b, H, N]` (ascending) to the first N slots.

        The transient is one copy of the kept tokens of one tensor.
        """
        for name, tensor in self._tensors.items():
            source = tensor if rows is None else tensor[rows]
            self.replace(rows, {name: gather_tokens(source, kept)})

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows."""
        for name, tensor in self._tensors.items():
            selected = tensor.index_select(0, rows.to(tensor.device))
            if self.fixed and selected.shape == tensor.shape:
                tensor.copy_(selected)
            else:
                self._tensors[name] = selected
        if self.order is not None:
            self.order = self.order.index_select(0, rows.to(self.order.device))

    def move(self, device: torch.device) -> None:
        """Bring all tensors to `device`."""
        for name, tensor in self._tensors.items():
            if tensor.device != device:
                self._tensors[name] = tensor.to(device, non_blocking=True)
        if self.order is not None:
            self.order = self.order.to(device, non_blocking=True)

    def make_writable(self) -> None:
        """Replace tensors made under `torch.inference_mode`, which cannot be written outside."""
        if torch.is_inference_mode_enabled():
            return
        for name, tensor in self._tensors.items():
            if tensor.is_inference():
                self._tensors[name] = tensor.clone()
        if self.order is not None and self.order.is_inference():
            self.order = self.order.clone()


def gather_tokens(source: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Pick tokens `kept` `[B, H, N]` of `[B, H or 1, S, ...]` along dim 2."""
    index = kept[:, : source.shape[1]]
    if source.dim() == 4:
        index = index.unsqueeze(-1).expand(*index.shape, source.shape[-1])
    return source.gather(2, index)


def _capacity(current: int, needed: int, limit: int) -> int:
    if needed > limit:
        return needed
    if limit <= PREALLOCATED_TOKENS:
        return limit
    return min(limit, max(needed, 2 * current, PREALLOCATED_TOKENS))

"""The token axis of the batch: which columns hold real tokens, and the chunk under way."""

from __future__ import annotations

import torch

from .chunk import Chunk


class Columns:
    """Shared by the layers of a cache, which all see the same columns."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self.announced: Chunk | None = None
        """The chunk that the mask of the current call told us about."""
        self.leader: int | None = None
        """The layer that takes in a chunk first."""
        self.seen = 0
        self._masks: list[tuple[int, torch.Tensor]] = []
        self._filled: tuple[tuple[int, int, torch.device], torch.Tensor] | None = None

    def take(self, start: int, length: int, layer_idx: int) -> Chunk:
        """The chunk of `length` columns after `start`, as announced or else without padding.

        Raises:
            RuntimeError: the layer is out of step with the others.
        """
        if self.leader is None:
            self.leader = layer_idx
        if self.seen not in (start, start + length):
            raise RuntimeError(
                f"layer {layer_idx} has seen {start} tokens but the cache {self.seen}: an earlier "
                "call of the model did not finish; call cache.reset() and start again."
            )
        chunk = self.announced
        if chunk is None or (chunk.start, chunk.length) != (start, length):
            chunk = Chunk.unpadded(start, length)
        if self.seen == start:
            self.seen += length
            if chunk.mask is not None:
                self._masks.append((start, chunk.mask))
        return chunk

    def filled(self, rows: int, value: int, device: torch.device) -> torch.Tensor:
        """`[rows]` int32 of one value, made once for all layers of a step."""
        key = (rows, value, device)
        if self._filled is None or self._filled[0] != key:
            self._filled = (key, torch.full((rows,), value, dtype=torch.int32, device=device))
        return self._filled[1]

    def padded(self, columns: int) -> bool:
        """Whether there is padding among the last `columns`."""
        first = self.seen - columns
        return any(
            bool((~mask[:, max(first - start, 0) :]).any())
            for start, mask in self._masks
            if start + mask.shape[1] > first
        )

    def real(self) -> torch.Tensor | None:
        """`[B, seen]` boolean, True where a real token came; None: everywhere."""
        if not self._masks:
            return None
        first = self._masks[0][1]
        real = torch.ones(first.shape[0], self.seen, dtype=torch.bool, device=first.device)
        for start, mask in self._masks:
            real[:, start : start + mask.shape[1]] = mask[:, : self.seen - start]
        return real

    def replace_real(self, real: torch.Tensor) -> None:
        """Take `[B, seen]` as what is real from now on."""
        self._masks = [(0, real)]

    def remove(self, columns: int) -> None:
        """Take back the last `columns`."""
        self.announced = None
        self.seen -= columns
        self._masks = [(start, mask) for start, mask in self._masks if start < self.seen]

    def select_rows(self, rows: torch.Tensor) -> None:
        """Reorder, repeat or drop rows."""
        self.announced = None
        self._masks = [(start, mask[rows.to(mask.device)]) for start, mask in self._masks]

"""Decoding steps that a compiled graph takes, out of Python's sight."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .static_layer import StaticBudgetLayer


class Tracing(threading.local):
    """Whose call comes next in the forward that this thread is tracing.

    Both are None whenever no trace is under way, which is all that a compiled graph checks. Eager
    code must not touch them: it has a state of its own.
    """

    def __init__(self) -> None:
        self.attending: StaticBudgetLayer | None = None
        self.masking: StaticBudgetLayer | None = None


tracing = Tracing()


class RowEnds:
    """Where each row takes its next token, on one device, for all static layers there.

    The layers of a cache fill and evict alike, so one tensor serves them all. The last of them that
    takes a step moves it on.
    """

    slots: torch.Tensor
    """`[B]` int64: tokens stored, which is the next free slot."""
    seen: torch.Tensor
    """0-dim int64: columns seen."""

    def __init__(self, batch: int, device: torch.device) -> None:
        # Tensors of inference mode could not be written by calls outside of it.
        with torch.inference_mode(False):
            self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
            self.seen = torch.zeros((), dtype=torch.int64, device=device)
        self.last: StaticBudgetLayer | None = None
        """The last layer of a step on this device."""
        self._told: tuple[list[int], int] | None = None
        for tensor in (self.slots, self.seen):
            torch._dynamo.mark_static_address(tensor)

    def tell(self, stored: list[int], seen: int) -> None:
        """Rows store `stored` tokens after `seen` columns."""
        if self._told != (stored, seen):
            self.slots.copy_(torch.tensor(stored))
            self.seen.fill_(seen)
            self._told = (stored, seen)

    def step(self) -> None:
        """Each row took a token."""
        self.slots.add_(1)
        self.seen.add_(1)

    def stepped(self, stored: list[int], seen: int) -> None:
        """Steps have brought the device to where the host has come to only now."""
        self._told = (stored, seen)


class UnseenSteps:
    """Counts decoding steps on the device, and tells the layers on the host when somebody looks.

    A graph cannot count in Python integers without being compiled anew, so the last static layer of
    a cache adds one to a tensor in each step; by then all layers have taken it.
    """

    def __init__(self) -> None:
        self.layers: list[StaticBudgetLayer] = []
        self._ends: dict[torch.device, RowEnds] = {}
        self._count: torch.Tensor | None = None
        self._open = False

    def restart(self) -> None:
        """Forget the layers, which join again with the next prompt; tensors stay where they are."""
        self.take()
        self.layers.clear()
        self._open = False

    def check_finished(self) -> None:
        """
        Raises:
            RuntimeError: a step was broken off: some layers took its token and others did not.
        """
        if self._open:
            raise RuntimeError(
                "an earlier call of the model did not finish: only some layers of the cache took "
                "its token; call cache.reset() and start again."
            )

    def begin(self, layer: StaticBudgetLayer) -> None:
        """`layer` is about to take a token, outside of a graph."""
        if self.layers[0] is layer:
            self.check_finished()
            self._open = True

    def finish(self, layer: StaticBudgetLayer) -> None:
        """`layer` took a token, outside of a graph."""
        if self.layers[-1] is layer:
            self._open = False

    def join(self, layer: StaticBudgetLayer, batch: int, device: torch.device) -> RowEnds:
        """`layer` takes part from now on; returns the ends of its device."""
        if layer not in self.layers:
            self.layers.append(layer)
        ends = self._ends.get(device)
        if ends is None or ends.slots.shape[0] != batch:
            ends = self._ends[device] = RowEnds(batch, device)
        ends.last = layer
        if self._count is None or self._count.device != device:
            with torch.inference_mode(False):
                self._count = torch.zeros((), dtype=torch.int64, device=device)
            torch._dynamo.mark_static_address(self._count)
        return ends

    def step(self, layer: StaticBudgetLayer) -> None:
        """`layer` took a token."""
        if self.layers[-1] is layer and self._count is not None:
            self._count.add_(1)

    def take(self) -> int:
        """Steps since the last call; waits for the device."""
        if self._count is None:
            return 0
        steps = int(self._count)
        if steps:
            self._count.zero_()
        return steps

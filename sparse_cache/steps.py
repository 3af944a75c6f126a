"""Decoding steps that a compiled graph takes, out of Python's sight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .static_layer import StaticBudgetLayer


@dataclass
class Tracing:
    """Whose call comes next in the forward that is being traced.

    Both are None whenever no trace is under way, which is all that a compiled graph checks. Eager
    code must not touch them: it uses the thread's own state.
    """

    attending: StaticBudgetLayer | None = None
    masking: StaticBudgetLayer | None = None


tracing = Tracing()


class UnseenSteps:
    """Counts decoding steps on the device, and tells the layers on the host when somebody looks.

    A graph cannot count in Python integers without being compiled anew, so the last static layer of
    a cache adds one to a tensor in each step; by then all layers have taken it.
    """

    def __init__(self) -> None:
        self.layers: list[StaticBudgetLayer] = []
        self.count: torch.Tensor | None = None
        """0-dim int64."""

    def join(self, layer: StaticBudgetLayer, device: torch.device) -> None:
        """`layer` takes part from now on."""
        if layer not in self.layers:
            self.layers.append(layer)
        if self.count is None or self.count.device != device:
            self.count = torch.zeros((), dtype=torch.int64, device=device)
            torch._dynamo.mark_static_address(self.count)

    def counts(self, layer: StaticBudgetLayer) -> bool:
        """Whether `layer` is the one that counts."""
        return self.layers[-1] is layer

    def take(self) -> int:
        """Steps since the last call; waits for the device."""
        if self.count is None:
            return 0
        steps = int(self.count)
        if steps:
            self.count.zero_()
        return steps

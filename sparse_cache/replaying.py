"""Which replayed forward this thread is in, for the attention dispatch to ask."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .replay.forward import ReplayedForward


class Replaying(threading.local):
    """The forward under a trace that this thread runs, or recomputes for a backward, right now."""

    def __init__(self) -> None:
        self.forward: ReplayedForward | None = None
        self.recomputable = False
        """Whether a checkpoint that knows of `forward` is around what runs."""
        self.models: list[torch.nn.Module] = []
        """The transformers models that contexts of this thread replay."""

    @contextlib.contextmanager
    def under(self, forward: ReplayedForward, *, recomputable: bool = False) -> Iterator[None]:
        """Run `forward`, and then what ran before: one model may call another."""
        before = self.forward, self.recomputable
        self.forward, self.recomputable = forward, recomputable
        try:
            yield
        finally:
            self.forward, self.recomputable = before


replaying = Replaying()

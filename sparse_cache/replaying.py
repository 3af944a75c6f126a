"""Which replayed forward this thread is in, for the attention dispatch to ask."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .replay.forward import ReplayedForward


class Replaying(threading.local):
    """The forward under a trace that this thread runs, or recomputes for a backward, right now."""

    def __init__(self) -> None:
        self.forward: ReplayedForward | None = None
        self.recomputable = False
        """Whether a checkpoint that knows of `forward` is around what runs."""


replaying = Replaying()

"""Gradient checkpoints that recompute a layer under the trace of its own forward.

A checkpoint runs a layer again in the backward, when the replay may be over, another one may have
begun, or a dense forward of the same model is part of the same loss. So the function that is
checkpointed takes the forward that it belongs to along.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..replaying import replaying
from .forward import ReplayedForward
from .substitutes import Substitute, substituted

_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Where transformers' layers and torch's `CheckpointWrapper` keep their checkpoint function."""


class _BoundCheckpoint(Substitute):
    """A checkpoint function that takes the forward of the calling thread along."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A compiled graph holds its recomputation itself.
        if replaying.forward is None or torch.compiler.is_dynamo_compiling():
            return self.original(function, *args, **kwargs)
        return self.original(_under(replaying.forward, function), *args, **kwargs)


@contextlib.contextmanager
def bound_checkpoints(model: torch.nn.Module) -> Iterator[None]:
    """Let the checkpoints of `model` take forwards under a trace along."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for name in _ATTRIBUTES:
                if callable(vars(module).get(name)):
                    stack.enter_context(substituted(_BoundCheckpoint, module, name))
        yield


def _under(forward: ReplayedForward, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with replaying.under(forward, recomputable=True):
            return function(*args, **kwargs)

    return run

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

_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Where transformers' layers and torch's `CheckpointWrapper` keep their checkpoint function."""


@contextlib.contextmanager
def bound_checkpoints(model: torch.nn.Module) -> Iterator[None]:
    """Let the checkpoints of `model` take forwards under a trace along."""
    bound = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in _ATTRIBUTES
        if callable(vars(module).get(name))
    ]
    for module, name, checkpoint in bound:
        setattr(module, name, _binding(checkpoint))
    try:
        yield
    finally:
        for module, name, checkpoint in bound:
            setattr(module, name, checkpoint)


def _binding(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint_bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A compiled graph holds its recomputation itself.
        if replaying.forward is None or torch.compiler.is_dynamo_compiling():
            return checkpoint(function, *args, **kwargs)
        return checkpoint(_under(replaying.forward, function), *args, **kwargs)

    return checkpoint_bound


def _under(forward: ReplayedForward, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = replaying.forward, replaying.recomputable
        replaying.forward, replaying.recomputable = forward, True
        try:
            return function(*args, **kwargs)
        finally:
            replaying.forward, replaying.recomputable = before

    return run

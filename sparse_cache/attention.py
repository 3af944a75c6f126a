"""How the cache sees the queries: the attention dispatch of transformers, wrapped once.

`Cache.update` receives keys and values only. A layer therefore hands out its keys with a reference
to itself on them (a Python attribute of that very tensor object), and after the attention function
ran, the wrapper reports the call to the layer. Where a model rebuilds the keys on the way (latent
attention, reshapes), the attribute is lost and the layer that was updated last in this thread is
taken, if the same module updated it and the number of keys fits.

Nothing is wrapped while no layer waits for its attention and no trace is replayed, so other models
are not affected.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from .replaying import replaying
from .steps import tracing

if TYPE_CHECKING:
    from .layer import BudgetLayer
    from .static_layer import StaticBudgetLayer

_TAG = "_sparse_budget_layer"
_LEVELS = 6
_thread = threading.local()


def hand_out(layer: BudgetLayer, keys: torch.Tensor, *, first: bool) -> None:
    """Mark `keys` as handed out by `layer`, which now waits for its attention.

    During the `first` call of a cache the thread goes on watching after the layer's attention ran,
    to learn whether other layers read the same keys.
    """
    setattr(keys, _TAG, layer)
    _thread.waiting = layer
    _thread.watching = first
    # The module matters only where the mark gets lost, and finding it takes a while.
    _thread.module = None if layer.keeps_marks else _calling_module()


def withdraw(layer: BudgetLayer) -> None:
    """`layer` no longer waits."""
    if getattr(_thread, "waiting", None) is layer:
        _thread.waiting = _thread.module = None


def _calling_module() -> weakref.ref[torch.nn.Module] | None:
    """The module whose code is updating a cache right now: the innermost one on the stack."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_LEVELS):
        if frame is None:
            return None
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.nn.Module):
            return weakref.ref(caller)
        frame = frame.f_back
    return None


def _waiting_layer(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor
) -> BudgetLayer | None:
    """The layer that handed out `key`, or that `key` has been made from."""
    marked: BudgetLayer | None = getattr(key, _TAG, None)
    if marked is not None:
        marked.keeps_marks = True
        return marked
    waiting: BudgetLayer | None = getattr(_thread, "waiting", None)
    updating = getattr(_thread, "module", None)
    if waiting is None or updating is None or updating() is not module:
        return None
    return waiting if waiting.fits(query, key) else None


def _reporting(attention: Callable[..., Any]) -> Callable[..., Any]:
    def attend_and_report(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        layer = _waiting_layer(module, query, key)
        if layer is None:
            return attention(module, query, key, value, *args, **kwargs)
        observer = getattr(_thread, "observer", None)
        arguments = dict(kwargs)
        if not layer.waits_for_attention:
            layer.keys_are_shared = True
            output = attention(module, query, key, value, *args, **kwargs)
        else:
            mask, rest = (args[0], args[1:]) if args else (kwargs.pop("attention_mask", None), ())
            layer.before_attention(module, key, mask)
            call = functools.partial(attention, module)
            output = layer.attend(call, query, key, value, mask, *rest, **kwargs)
            layer.after_attention(query, key, value, mask, kwargs)
        if observer is not None:
            arguments.pop("attention_mask", None)
            observer(module, layer, (query, key, value), arguments, output)
        return output

    return attend_and_report


def _in_graph(attention: Callable[..., Any], layer: StaticBudgetLayer) -> Callable[..., Any]:
    """`attention` and what `layer` does after it, for a graph that is being traced."""

    def attend_and_count(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Any:
        call = functools.partial(attention, module)
        output = layer.attend(call, query, key, value, attention_mask, **kwargs)
        layer.after_attention(query, key, value, attention_mask, kwargs)
        return output

    return attend_and_count


@contextlib.contextmanager
def observed(observer: Callable[..., None]) -> Iterator[None]:
    """Tell `observer` of the attention calls of this thread that read a budgeted layer's keys.

    Args:
        observer: called with the attention module, the layer, `(query, key, value)`, attention's
            keyword arguments without the mask, and what attention returned.
    """
    _thread.observer = observer
    try:
        yield
    finally:
        _thread.observer = None


def install() -> None:
    """Let attention calls be reported. Done once, by the first cache or replay that is made."""
    if getattr(AttentionInterface, "_serves_sparse_budget_cache", False):
        return
    look_up = AttentionInterface.get_interface

    def get_interface(
        self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        attention = look_up(self, attn_implementation, default)
        if torch.compiler.is_dynamo_compiling() and tracing.attending is not None:
            return _in_graph(attention, tracing.attending)
        if replaying.forward is not None:
            return replaying.forward.attending(attention)
        if getattr(_thread, "waiting", None) is None and not getattr(_thread, "watching", False):
            return attention
        return _reporting(attention)

    AttentionInterface.get_interface = get_interface
    AttentionInterface._serves_sparse_budget_cache = True

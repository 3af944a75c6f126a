"""How the cache sees the queries: the attention dispatch of transformers, wrapped once.

`Cache.update` receives keys and values only. A layer therefore hands out its keys with a reference
to itself on them (a Python attribute of that very tensor object), and after the attention function
ran, the wrapper reports the call to the layer. Where a model rebuilds the keys on the way (latent
attention, reshapes), the attribute is lost and the layer that was updated last in this thread is
taken, if the number of keys fits.

Nothing is wrapped while no layer waits for its attention, so other models are not affected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

if TYPE_CHECKING:
    from .layer import BudgetLayer

_TAG = "_sparse_budget_layer"
_thread = threading.local()


def hand_out(layer: BudgetLayer, keys: torch.Tensor, *, first: bool) -> None:
    """Mark `keys` as handed out by `layer`, which now waits for its attention.

    During the `first` call of a cache the thread goes on watching after the layer's attention ran,
    to learn whether other layers read the same keys.
    """
    setattr(keys, _TAG, layer)
    _thread.waiting = layer
    _thread.watching = first


def withdraw(layer: BudgetLayer) -> None:
    """`layer` no longer waits."""
    if getattr(_thread, "waiting", None) is layer:
        _thread.waiting = None


def _reporting(attention: Callable[..., Any]) -> Callable[..., Any]:
    def attend_and_report(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        layer: BudgetLayer | None = getattr(key, _TAG, None)
        if layer is None:
            waiting: BudgetLayer | None = getattr(_thread, "waiting", None)
            if waiting is not None and waiting.fits(query, key):
                layer = waiting
        if layer is None or not layer.waits_for_attention:
            if layer is not None:
                layer.keys_are_shared = True
            return attention(module, query, key, value, *args, **kwargs)
        layer.before_attention(module)
        output = attention(module, query, key, value, *args, **kwargs)
        mask = args[0] if args else kwargs.get("attention_mask")
        layer.after_attention(query, key, value, mask, kwargs)
        return output

    return attend_and_report


def install() -> None:
    """Let attention calls be reported. Done once, by the first cache that is made."""
    if getattr(AttentionInterface, "_serves_sparse_budget_cache", False):
        return
    look_up = AttentionInterface.get_interface

    def get_interface(
        self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        attention = look_up(self, attn_implementation, default)
        if getattr(_thread, "waiting", None) is None and not getattr(_thread, "watching", False):
            return attention
        return _reporting(attention)

    AttentionInterface.get_interface = get_interface
    AttentionInterface._serves_sparse_budget_cache = True

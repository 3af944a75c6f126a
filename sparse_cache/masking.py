"""The mask of a layer whose stored tokens are no longer the columns of the batch.

transformers builds one mask a forward: it asks the cache for sizes and then calls the mask function
of the attention implementation. After an eviction the stored slots of a row are neither all columns
nor the last ones, so that function is handed the validity of OUR slots instead of the batch's 2D
mask. It then produces whatever its implementation needs (boolean, additive, block mask, lengths),
also for models whose attention code is their own.

The hand-over is a thread-local request left by `get_mask_sizes` and taken by the next look-up of a
mask function. A look-up without a request returns the function untouched, so models that do not use
our cache are not affected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from .errors import UnsupportedModelError
from .replaying import replaying
from .steps import tracing

if TYPE_CHECKING:
    from .replay.forward import ReplayedForward
    from .static_layer import StaticBudgetLayer

_handover = threading.local()


@dataclass(frozen=True)
class MaskRequest:
    """Sizes just given to transformers, and who makes the mask out of them."""

    sizes: tuple[int, int]
    """`(q_length, kv_length)`."""
    slot_mask: Callable[[torch.Tensor | None], torch.Tensor | None]
    """From the batch's 2D mask to ours `[B, kv_length]` in slots (None: everything is visible)."""
    query_offset: int
    """Slots before the first query."""
    learn: Callable[[PreTrainedConfig], None]
    """Told the config of the model that asks for the mask, before anything else."""


def request_mask(request: MaskRequest | None) -> None:
    """Leave a request for the next mask of this thread; None withdraws one."""
    _handover.request = request


def _slot_mask_function(request: MaskRequest, build: Callable[..., Any]) -> Callable[..., Any]:
    def build_slot_mask(*args: Any, **kwargs: Any) -> Any:
        if args or (kwargs.get("q_length"), kwargs.get("kv_length")) != request.sizes:
            return build(*args, **kwargs)
        request.learn(kwargs["config"])
        kwargs["attention_mask"] = request.slot_mask(kwargs.get("attention_mask"))
        kwargs["q_offset"], kwargs["kv_offset"] = request.query_offset, 0
        return build(**kwargs)

    return build_slot_mask


def _mask_in_graph(layer: StaticBudgetLayer, build: Callable[..., Any]) -> Callable[..., Any]:
    """`build` for a decoding step that is being traced: over the layer's slots, all in the past."""

    def build_step_mask(**kwargs: Any) -> Any:
        kwargs["attention_mask"] = layer.step_mask()
        kwargs["q_offset"], kwargs["kv_offset"] = kwargs["kv_length"] - 1, 0
        return build(**kwargs)

    return build_step_mask


def _mask_under_trace(
    forward: ReplayedForward, implementation: str, build: Callable[..., Any]
) -> Callable[..., Any]:
    """`build` for a replayed forward, which may not look at causal masks: they take `[B, T, T]`."""

    def build_mask_under_trace(*args: Any, **kwargs: Any) -> Any:
        causal = kwargs.get("mask_function") is causal_mask_function
        # Only SDPA's attention takes None for a causal mask.
        skips = implementation == "sdpa" and kwargs.get("allow_is_causal_skip")
        if causal and skips and forward.needs_no_mask(kwargs.get("config")):
            return None
        mask = build(*args, **kwargs)
        if causal and not torch.compiler.is_dynamo_compiling():
            forward.causal_masks.append(mask)
        return mask

    return build_mask_under_trace


def install() -> None:
    """Let mask look-ups see requests. Done once, by the first cache or replay that is made."""
    if getattr(AttentionMaskInterface, "_serves_sparse_budget_cache", False):
        return
    look_up = AttentionMaskInterface.__getitem__

    def __getitem__(self: AttentionMaskInterface, key: str) -> Callable[..., Any]:
        build = look_up(self, key)
        if torch.compiler.is_dynamo_compiling() and tracing.masking is not None:
            layer, tracing.masking = tracing.masking, None
            return _mask_in_graph(layer, build)
        request = getattr(_handover, "request", None)
        if replaying.forward is not None:
            if request is not None:
                request_mask(None)
                raise UnsupportedModelError(
                    "a SparseBudgetCache is used inside of a replayed forward, by a hook for "
                    "example; use it before or after the forward."
                )
            return _mask_under_trace(replaying.forward, key, build)
        if request is None:
            return build
        _handover.request = None
        return _slot_mask_function(request, build)

    AttentionMaskInterface.__getitem__ = __getitem__
    AttentionMaskInterface._serves_sparse_budget_cache = True

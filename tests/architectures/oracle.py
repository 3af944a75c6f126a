"""The truth for a recorded eviction: one dense forward in which dead tokens are masked.

Nothing here uses the library's own hooks. The model is built with eager attention and run once on
the whole sequence with an ordinary `DynamicCache` that reports which layer was updated last. While
it runs, every softmax over a square matrix of attention scores gets the death mask of that layer
added, and so does every top-k of an indexer. Nothing is ever removed from the cache, so positions,
masks and head orders are the model's own.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

Deaths = list[Tensor | None]


class LayerReporter(DynamicCache):
    """A dense cache that knows which layer it was last asked about, and whose keys a tensor is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.current = 0
        self.owners: dict[int, int] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.current = layer_idx
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.owners[keys.data_ptr()] = layer_idx
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self.current = layer_idx
        return super().update_indexer(indexer_key_states, layer_idx)


class DeathMask:
    """Additive masks, [B, H, T, T] in float32, from the query position at which each token dies."""

    def __init__(self, deaths: Deaths) -> None:
        self.masks: list[Tensor | None] = []
        for death in deaths:
            if death is None or death.numel() == 0:
                self.masks.append(None)
                continue
            query = torch.arange(death.shape[-1])[:, None]
            dead = query >= death[..., None, :].long()
            self.masks.append(
                torch.zeros(dead.shape).masked_fill_(dead, torch.finfo(torch.float32).min)
            )

    def for_scores(self, layer: int, scores: Tensor) -> Tensor | None:
        """The mask of a layer for attention scores, in their shape.

        Scores are [B, Hq, T, T], [B, Hq, T, T + 1] with an attention sink, or [B * Hq, T, T].
        """
        mask = self.masks[layer] if layer < len(self.masks) else None
        if mask is None or scores.ndim not in (3, 4):
            return None
        length = mask.shape[-1]
        if scores.shape[-2] != length or scores.shape[-1] not in (length, length + 1):
            return None
        if scores.ndim == 3:
            by_head = self.for_scores(layer, scores.unflatten(0, (mask.shape[0], -1)))
            return by_head.expand(-1, scores.shape[0] // mask.shape[0], -1, -1).flatten(0, 1)
        heads, query_heads = mask.shape[1], scores.shape[1]
        if bool((mask == mask[:, :1]).all()):
            mask = mask[:, :1]
        elif heads != query_heads:
            mask = mask.repeat_interleave(query_heads // heads, dim=1)
        return torch.nn.functional.pad(mask, (0, scores.shape[-1] - length))

    def for_indexer(self, layer: int, scores: Tensor) -> Tensor | None:
        """The mask of a layer for indexer scores [B, T, T]; all heads must die together."""
        mask = self.masks[layer] if layer < len(self.masks) else None
        if mask is None or scores.ndim != 3 or scores.shape[-2:] != mask.shape[-2:]:
            return None
        if not bool((mask == mask[:, :1]).all()):
            raise ValueError("an indexed layer must evict the same tokens for all heads")
        return mask[:, 0]


@contextmanager
def masked_softmax(cache: LayerReporter, deaths: DeathMask, used: set[int]) -> Iterator[None]:
    """Add the current layer's death mask in every attention softmax and indexer top-k."""
    functional = torch.nn.functional
    softmax, torch_softmax, tensor_softmax = (
        functional.softmax,
        torch.softmax,
        Tensor.softmax,
    )
    logsumexp, tensor_logsumexp = torch.logsumexp, Tensor.logsumexp
    topk, tensor_topk, sdpa = torch.topk, Tensor.topk, functional.scaled_dot_product_attention

    def masked(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            mask = deaths.for_scores(cache.current, scores)
            if mask is not None:
                used.add(cache.current)
                # doubled dead entries must stay finite: fully masked rows would become NaN
                scores = (scores.float() + mask).clamp(min=torch.finfo(torch.float32).min)
            return original(scores, *args, **kwargs)

        return call

    def chosen(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            mask = deaths.for_indexer(cache.current, scores)
            if mask is not None:
                scores = torch.where(mask < 0, torch.finfo(scores.dtype).min, scores)
            return original(scores, *args, **kwargs)

        return call

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("the oracle needs attention that goes through a softmax")

    functional.softmax, torch.softmax = masked(softmax), masked(torch_softmax)
    Tensor.softmax = masked(tensor_softmax)  # type: ignore[method-assign]
    torch.logsumexp = masked(logsumexp)
    Tensor.logsumexp = masked(tensor_logsumexp)  # type: ignore[method-assign]
    torch.topk, Tensor.topk = chosen(topk), chosen(tensor_topk)  # type: ignore[method-assign]
    functional.scaled_dot_product_attention = refuse
    try:
        yield
    finally:
        functional.softmax, torch.softmax = softmax, torch_softmax
        Tensor.softmax = tensor_softmax  # type: ignore[method-assign]
        torch.logsumexp, Tensor.logsumexp = logsumexp, tensor_logsumexp  # type: ignore[method-assign]
        torch.topk, Tensor.topk = topk, tensor_topk  # type: ignore[method-assign]
        functional.scaled_dot_product_attention = sdpa


@contextmanager
def layers_found_by_key(model: PreTrainedModel, cache: LayerReporter) -> Iterator[None]:
    """Let attention calls without an update of their own name the layer whose keys they read.

    Layers that share another layer's keys and values do not update the cache. Under a name of our
    own in the attention interface, the layer is found by the key tensor itself; the model's own
    eager attention then does the work.
    """

    def attention(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        owner = cache.owners.get(key.data_ptr())
        if owner is not None:
            cache.current = owner
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, *args, **kwargs)

    AttentionInterface.register("architecture_oracle", attention)
    AttentionMaskInterface.register("architecture_oracle", eager_mask)
    configs = {
        id(module.config): module.config
        for module in model.modules()
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    }
    for config in configs.values():
        config._attn_implementation_internal = "architecture_oracle"
    try:
        yield
    finally:
        for config in configs.values():
            config._attn_implementation_internal = "eager"


@contextmanager
def nothing() -> Iterator[None]:
    """A context that changes nothing."""
    yield


@torch.no_grad()
def oracle_logits(
    eager_model: PreTrainedModel, input_ids: Tensor, deaths: Deaths
) -> tuple[Tensor, set[int]]:
    """Logits of one dense forward in which token j is hidden from query i once death[j] <= i.

    Args:
        eager_model: the model under test, built with eager attention and the same weights.
        input_ids: [B, T], without padding.
        deaths: per cache layer, int32 [B, H, T] or None where nothing is evicted.

    Returns:
        Logits [B, T, V], and the layers whose mask was applied at least once.
    """
    cache = LayerReporter(eager_model.config)
    shares = any(isinstance(layer, DummyLayer) for layer in cache.layers)
    used: set[int] = set()
    # generate gives positions where a model takes them, also where the model's own default differs.
    positions = {}
    if "position_ids" in inspect.signature(eager_model.forward).parameters:
        positions["position_ids"] = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
    with (
        layers_found_by_key(eager_model, cache) if shares else nothing(),
        masked_softmax(cache, DeathMask(deaths), used),
    ):
        output = eager_model(input_ids, past_key_values=cache, use_cache=True, **positions)
    return output.logits, used

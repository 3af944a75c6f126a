"""Which attention module of a model reads which layer of a cache.

The module's own `layer_idx` says so for most models, but not where layers share keys (Gemma 3n) or
modules (Zamba 2), and it does not say whether the attention is the plain kind. So the model runs
once on a few tokens with a cache of ours, which hears of every attention call.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import attention
from ..attention_arguments import scaling_of, sinks_of, softcap_of, unknown_arguments
from ..cache import SparseBudgetCache
from ..errors import UnsupportedModelError
from ..ragged_attention import padded_attention

_TOKENS = 6
_PADDING = 2


@dataclass(frozen=True)
class Site:
    """One attention call of a forward."""

    module: weakref.ref[torch.nn.Module]
    layer: int
    """The cache layer whose keys it reads."""
    heads: int
    """KV heads that the cache stores for the layer."""
    plain: bool
    """Whether it computes softmax attention under the causal mask and nothing else."""


@dataclass(frozen=True)
class Sites:
    """The attention calls that read budgeted layers, in the order of a forward."""

    calls: list[Site]
    implementation: str | None
    """Name of the attention implementation that they were found with."""

    @property
    def heads(self) -> dict[int, int]:
        """KV heads stored by each budgeted layer, by its index."""
        return {call.layer: call.heads for call in self.calls}


_known: weakref.WeakKeyDictionary[PreTrainedModel, Sites] = weakref.WeakKeyDictionary()
_finding = threading.RLock()
"""Two threads that change a model's mode for a while would not leave it as it was."""


def language_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside of whatever wraps it.

    Raises:
        TypeError: there is none.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise TypeError(
        f"model must be a transformers model, or a module around one, got {type(model).__name__}."
    )


def attention_sites(model: torch.nn.Module) -> Sites:
    """Find out, by one call of the model on two short rows the first time it is asked about.

    Args:
        model: a transformers model or a module around one (LoRA, DDP, FSDP, compiled).

    Raises:
        TypeError: there is no transformers model inside.
        UnsupportedModelError: its attention cannot be replayed.
    """
    inner = language_model(model)
    implementation = inner.config._attn_implementation
    with _finding:
        sites = _known.get(inner)
        if sites is None or sites.implementation != implementation:
            sites = Sites(_find(_callable(model), inner), implementation)
            _known[inner] = sites
    return sites


def _callable(model: torch.nn.Module) -> torch.nn.Module:
    """What can be called without gradients: DDP would exchange buffers with other processes."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def _find(model: torch.nn.Module, inner: PreTrainedModel) -> list[Site]:
    config = inner.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{config.model_type} has an encoder, but replay serves decoder-only models."
        )
    if not getattr(config.get_text_config(), "is_causal", True):
        raise UnsupportedModelError(
            f"this {config.model_type} attends in both directions (config.is_causal=False), but a "
            "trace speaks of causal attention."
        )
    # A forward with so few tokens evicts nothing.
    cache = SparseBudgetCache(64, policy="streaming", window=1, sinks=0, config=config, record=True)
    calls: list[tuple[weakref.ref[torch.nn.Module], int, bool]] = []

    def observe(
        module: torch.nn.Module, layer: Any, tensors: tuple[Any, ...], arguments: Any, output: Any
    ) -> None:
        if all(layer is not own for own in cache.layers):
            return  # of another model, which a hook of this one calls
        query, key, value = tensors
        plain = _is_plain(query, key, value, real, arguments, output)
        calls.append((weakref.ref(module), layer.layer_idx, plain))

    device = inner.get_input_embeddings().weight.device
    ids = torch.arange(2 * _TOKENS, device=device).view(2, -1) % config.get_text_config().vocab_size
    real = torch.ones(2, _TOKENS, dtype=torch.bool, device=device)
    real[1, :_PADDING] = False
    with _at_rest(model), attention.observed(observe):
        model(input_ids=ids, attention_mask=real.long(), past_key_values=cache, use_cache=True)
    cache.stats()
    budgeted = {layer.layer_idx: layer for layer in cache._budgeted()}
    if not budgeted:
        raise UnsupportedModelError(
            f"no layer of {config.model_type} has full attention, so nothing is ever evicted and "
            "there is nothing to replay; call the model without replay."
        )
    missed = sorted(budgeted.keys() - {layer for _, layer, _ in calls})
    if missed:
        raise UnsupportedModelError(
            f"{config.model_type} computes attention itself instead of asking transformers' "
            f"AttentionInterface (layers {missed}), so replay cannot reach it."
        )
    if any("indexer" in layer.held.storage for layer in budgeted.values()):
        raise UnsupportedModelError(
            f"{config.model_type} chooses tokens by an indexer, which would choose among evicted "
            "tokens in a forward over the whole sequence, so replay would not be exact."
        )
    if getattr(config, "keep_window_size", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type} keeps the keys that score best in its mask, and would score "
            "evicted tokens too in a forward over the whole sequence, so replay would not be exact."
        )
    trace = cache.trace()
    heads = dict(zip(trace.layer_indices, (d.shape[1] for d in trace.deaths), strict=True))
    return [Site(module, layer, heads[layer], plain) for module, layer, plain in calls]


@contextlib.contextmanager
def _at_rest(model: torch.nn.Module) -> Iterator[None]:
    """No dropout, no gradients, no compiled code; afterwards all is as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _is_plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor,
    arguments: dict[str, Any],
    output: Any,
) -> bool:
    """Whether `output` is what causal softmax attention gives, in all rows and columns."""
    theirs = output[0] if isinstance(output, tuple) else output
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    if unknown_arguments((), arguments) or getattr(theirs, "shape", None) != shape:
        return False
    if query.shape[1] % key.shape[1] or key.shape[2] != query.shape[2]:
        return False
    real = real.to(query.device)
    causal = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=query.device).tril()
    mine = padded_attention(
        query,
        key,
        value,
        causal & real[:, None, None, :] | torch.eye(_TOKENS, device=query.device).bool(),
        scaling=scaling_of(query, arguments),
        softcap=softcap_of(arguments),
        sinks=sinks_of(arguments),
    ).transpose(1, 2)
    mine, theirs = mine[real].float(), theirs[real].float()
    tolerance = 1e-3 if query.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((mine - theirs).abs().max() <= tolerance * theirs.abs().max() + 1e-6)

"""`replay`: the context in which a model's ordinary forward runs under a trace."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import attention, masking
from ..errors import UnsupportedModelError
from ..replaying import replaying
from ..trace import NEVER, EvictionTrace
from .checkpointing import bound_checkpoints
from .forward import WAYS, ReplayedForward, ReplayedLayer
from .sites import Sites, attention_sites, language_model
from .substitutes import forward_here, forward_of

_CACHES = ("past_key_values", "cache")


@contextlib.contextmanager
def replay(model: torch.nn.Module, trace: EvictionTrace, *, way: str = "auto") -> Iterator[None]:
    """Run a model's full-sequence forwards under the evictions of a recorded rollout.

    ```python
    cache = SparseBudgetCache(budget=512, record=True)
    sequences = model.generate(**inputs, past_key_values=cache)
    with replay(model, cache.trace()):
        logits = model(sequences, attention_mask=mask).logits    # with gradients
    ```

    Every query then attends to exactly the tokens that the sampler's cache held at that step, per
    layer and KV head, so the logits are those that the rollout was sampled from. Layers without a
    budget (sliding-window, linear) are as always. Gradient checkpoints recompute under the same
    trace, also after the context has ended, and forwards outside of it, or of other models, are not
    affected. If the model takes position ids and gets none, it gets those of `generate` (each row's
    real tokens are counted); it makes no cache.

    Only calls of `model` itself by the thread that began the context are replayed. Calls of a part
    of it, such as `model.model(...)`, or by other threads are dense.

    What a cache with `quantization` rounded is not rounded again: the sampler's logits then come
    back as closely as its 8 bits allow.

    The first replay of a model calls it once on two short rows, without gradients, to learn its
    layers; under FSDP all processes have to begin the replay together.

    Args:
        model: what is called inside: a transformers model, or a module around one (LoRA, DDP,
            FSDP, `torch.compile`).
        trace: of the sequences that the model is called with. They may have one token more than the
            trace, as the last sampled token was never fed to the sampler; padding must lie where it
            lay in the rollout (see `EvictionTrace.aligned_to`). Tokens at the end may be masked
            that the sampler saw as real, such as padding behind an end-of-text token.
        way: `"gather"` attends by period with the tokens that are alive in it, which costs
            `T * (budget + interval)` instead of `T * T / 2`; `"flex"` uses FlexAttention (no
            gradients on a CPU); `"dense"` gives the model's own attention a mask `[B, Hq, T, T]`.
            All compute the same. `"auto"` gathers where the model's attention is plain causal
            softmax attention (softcap and sinks included) and is dense elsewhere.

    Raises:
        TypeError, ValueError: the trace does not fit the model or what the model is called with,
            a cache is passed, or `way` is unknown.
        UnsupportedModelError: the model cannot be replayed exactly; also if a mask lets tokens see
            later ones (those of an image, for example), which no trace tells of.
        RuntimeError: `model` was not called inside of the context, or not wholly under the trace;
            or this thread replays it already.
    """
    check_way(way)
    if not isinstance(trace, EvictionTrace):
        raise TypeError(
            f"trace must be an EvictionTrace such as cache.trace(), got {type(trace).__name__}."
        )
    trace.validate()
    _refuse_wrapper(model)
    check_not_under_replay(model)
    sites = attention_sites(model)
    run = _Replay(model, trace, sites, way)
    attention.install()
    masking.install()
    # The list, as another thread may end the context: that of a generator, for example.
    models, inner = replaying.models, language_model(model)
    models.append(inner)
    try:
        with forward_of(model, run.forward), bound_checkpoints(model):
            yield
        run.check_used()
    finally:
        models.remove(inner)


def check_way(way: str) -> None:
    """Raise ValueError for one that does not exist."""
    if way not in WAYS:
        raise ValueError(f"way={way!r} is unknown; choose one of {', '.join(WAYS)}.")


def check_not_under_replay(model: torch.nn.Module) -> None:
    """Raise RuntimeError if this thread has `model`, or what is inside of it, under replay."""
    if any(language_model(model) is other for other in replaying.models):
        raise RuntimeError(
            "the model is under replay already in this thread, and would run under two policies at "
            "a time; end that context first."
        )


def _refuse_wrapper(model: torch.nn.Module) -> None:
    if isinstance(model, torch.nn.DataParallel):
        raise UnsupportedModelError(
            "model is a DataParallel, which copies the model for every call, out of replay's "
            "sight; use DistributedDataParallel."
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedModelError(
            "model was compiled in place by model.compile(), which hides its calls from replay; "
            "use compiled = torch.compile(model) and replay(compiled, trace)."
        )
    for module in model.modules():
        adapter = getattr(module, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"model has an adapter of {type(adapter).__name__}, whose virtual tokens no trace "
                "tells of; replay serves adapters of the weights, such as LoRA."
            )


class _Replay:
    """Begins and ends the forwards of one context."""

    def __init__(
        self, model: torch.nn.Module, trace: EvictionTrace, sites: Sites, way: str
    ) -> None:
        self._inner = language_model(model)
        self._own_forward: Callable[..., Any] = forward_here(model)
        self._signature = inspect.signature(self._inner.forward)
        self._configs = [
            module.config for module in model.modules() if isinstance(module, PreTrainedModel)
        ]
        self._trace = trace
        self._sites = sites
        self._way = way
        self._forwards = 0
        self._compiled = any(
            isinstance(module, torch._dynamo.OptimizedModule)
            or getattr(module, "_compiled_call_impl", None) is not None
            for module in model.modules()
        )
        self._deaths = self._by_layer()
        self._real = trace.deaths[0][:, 0] != 0

    def _by_layer(self) -> dict[int, torch.Tensor]:
        """Deaths by layer index, with one head where all evict alike."""
        heads, trace = self._sites.heads, self._trace
        if set(heads) != set(trace.layer_indices):
            raise ValueError(
                f"the trace is of another model: it has budgets in layers {trace.layer_indices}, "
                f"this model in layers {sorted(heads)}."
            )
        deaths = {}
        for layer, death in zip(trace.layer_indices, trace.deaths, strict=True):
            if death.shape[1] != heads[layer]:
                raise ValueError(
                    f"the trace is of another model: it has {death.shape[1]} KV heads in layer "
                    f"{layer}, this model stores {heads[layer]}."
                )
            alike = bool((death == death[:, :1]).all())
            deaths[layer] = death[:, :1] if alike else death
        return deaths

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of the model: the same under the trace."""
        forward, kwargs = self._begin(args, kwargs)
        # One that nobody took would be taken for a cache inside of this forward.
        masking.request_mask(None)
        self._forwards += 1
        with replaying.under(forward):
            output = self._own_forward(*args, **kwargs)
        self._check_reached(forward)
        return output

    @torch.compiler.disable
    def _begin(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ReplayedForward, dict[str, Any]]:
        """Check what the model is called with; add what it needs."""
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = given | given.get("kwargs", {})
        for name in _CACHES:
            if given.get(name) is not None:
                raise ValueError(
                    f"{name} was passed inside of replay, which runs whole sequences without a "
                    "cache; leave it out."
                )
        real = self._real_tokens(given)
        positions = positions_of(real)
        if given.get("position_ids") is None:
            if "position_ids" in self._signature.parameters:
                kwargs = kwargs | {"position_ids": positions}
        else:
            _check_positions(given["position_ids"], positions, real)
        if given.get("use_cache") is None:
            kwargs = kwargs | {"use_cache": False}
        return self._under_trace(real), kwargs

    def _real_tokens(self, given: dict[str, Any]) -> torch.Tensor:
        """`[B, T]` boolean: which columns hold tokens.

        Raises:
            ValueError: these are not the sequences of the trace.
        """
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ValueError("the model was called without input_ids inside of replay.")
        shape = batch, length = tuple(tokens.shape[:2])
        traced, seen = self._real.shape
        if batch != traced or length not in (seen, seen + 1):
            raise ValueError(
                f"input_ids has {batch} rows of {length} tokens, but the trace is of {traced} rows "
                f"of {seen} tokens; pass the rollout's own sequences (with or without the last "
                "token, which the sampler never read), or trace.select_rows, .pad or .truncate."
            )
        mask = given.get("attention_mask")
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=tokens.device)
        elif not isinstance(mask, torch.Tensor) or tuple(mask.shape) != shape:
            found = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be the 2D mask of the sequences, {list(shape)}, got {found}."
            )
        real = mask.bool()
        mine = real[:, :seen].to(self._real.device)
        if bool((mine & ~self._real).any()):
            row = int((mine & ~self._real).any(-1).nonzero()[0])
            column = int((mine & ~self._real)[row].nonzero()[0])
            raise ValueError(
                f"attention_mask says that column {column} of row {row} is a token, but it was "
                "padding in the rollout; pass the rollout's own mask and padding side, or replay "
                "trace.aligned_to(attention_mask)."
            )
        # Behind a row's last token nothing matters any more.
        later = mine.flip(-1).cumsum(-1).flip(-1) > 0
        hidden = self._real & ~mine & (later | real[:, seen:].any(-1, keepdim=True).to(later))
        if bool(hidden.any()):
            row = int(hidden.any(-1).nonzero()[0])
            column = int(hidden[row].nonzero()[0])
            raise ValueError(
                f"attention_mask says that column {column} of row {row} is padding, but it was a "
                "token in the rollout; pass the rollout's own mask and padding side, or replay "
                "trace.aligned_to(attention_mask)."
            )
        return real

    def _under_trace(self, real: torch.Tensor) -> ReplayedForward:
        layers: dict[torch.nn.Module, list[ReplayedLayer]] = {}
        deaths = {}
        for layer, death in self._deaths.items():
            death = torch.nn.functional.pad(death, (0, real.shape[1] - death.shape[2]), value=NEVER)
            deaths[layer] = death.masked_fill(~real.to(death.device)[:, None], 0)
        for site in self._sites.calls:
            module = site.module()
            if module is not None:
                layers.setdefault(module, []).append(
                    ReplayedLayer(site, deaths[site.layer], self._way)
                )
        plain = all(site.plain for site in self._sites.calls)
        ignores_masks = plain and self._way != "dense"
        return ReplayedForward(layers, ignores_masks=ignores_masks, configs=self._configs)

    @torch.compiler.disable
    def _check_reached(self, forward: ReplayedForward) -> None:
        """Raise if a layer attended past the trace."""
        if self._compiled:
            return
        missed = [
            layers[0] for module, layers in forward.layers.items() if _missed(forward, module)
        ]
        if missed or len(forward.layers) < len({site.module for site in self._sites.calls}):
            where = missed[0].site.layer if missed else "of a module that is gone"
            raise RuntimeError(
                f"the attention of layer {where} did not run under the trace; compile the model "
                "alone, not a function around it, and if its modules were replaced, load it anew."
            )

    def check_used(self) -> None:
        """Raise if nothing was replayed: the caller called something else."""
        if not self._forwards:
            raise RuntimeError(
                "the model given to replay was never called inside of it; give it what you call: "
                "the wrapped or compiled model, if there is one."
            )


def _missed(forward: ReplayedForward, module: torch.nn.Module) -> bool:
    return forward.attended.count(module) < len(forward.layers[module])


def positions_of(real: torch.Tensor) -> torch.Tensor:
    """`[B, T]` int64: each row's real tokens counted, as `generate` does; 0 before the first."""
    return (real.long().cumsum(-1) - 1).clamp(min=0)


def _check_positions(given: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> None:
    """Refuse positions that start again inside of a row: several texts packed into one."""
    if given.dim() != 2:
        return
    gap = (given.to(expected.device) - expected).expand(expected.shape)
    first = real.to(gap.device).int().argmax(-1, keepdim=True)
    if bool(((gap != gap.gather(-1, first)) & real).any()):
        raise ValueError(
            "position_ids do not count the tokens of each row one by one; replay serves one "
            "sequence a row, so leave position_ids out."
        )

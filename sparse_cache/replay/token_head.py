"""Results per token from a language model's logits, without ever holding all the logits.

`[tokens, vocabulary]` logits in float32 are often the largest tensor of a training step. Here the
model's own forward runs as the user wrapped it, but its output head only keeps its hidden states'
per-token results: chunks of tokens go through the head, then through what the model does to logits
after its head, then through a function `per_chunk(logits float32 [n, V], *columns [n, ...]) ->
[n, k]`; each chunk is checkpointed, so that backward computes its logits again.

What a model does to logits after its head is not visible from outside. The head gives the model the
true logits of a few tokens to return; the rule that was used (a constant factor, a softcap) must
explain what came back, in every call. If it does not, the rule is fitted and the forward is run once
more; if no rule explains it, the model's own full logits are used, with a warning.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError, warn_once

PerChunk = Callable[..., Tensor]

#: Tokens whose true logits are shown to the model's code after the head, in every call.
PROBES = 4


class AfterHead(NamedTuple):
    """Elementwise rule from the head's output to the logits: scale, then softcap (Gemma 2)."""

    factor: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def explains(self, raw: Tensor, returned: Tensor) -> bool:
        """Whether this rule turns `raw` into `returned` up to rounding in the model's dtype."""
        if raw.shape != returned.shape:
            return False
        dtype = max(raw.dtype, returned.dtype, key=lambda kind: torch.finfo(kind).eps)
        expected, got = self(raw.double()), returned.double()
        largest = torch.maximum(got.abs().max(), expected.abs().max()).clamp_min(1e-30)
        error = (expected - got).abs().max() / largest
        return bool(error <= 8 * torch.finfo(dtype).eps)


@dataclass
class _Pass:
    """What one forward with a replaced head leaves behind."""

    raw: Tensor | None = None
    returned: Tensor | None = None
    results: Tensor | None = None
    head_calls: int = 0


class _Tie(torch.autograd.Function):
    """`value` unchanged, made dependent on `other`, which gets a gradient of zeros.

    Hooks of wrappers (FSDP gathers a module's parameters when gradient reaches the module's
    output) then run before the chunks are computed again.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        ctx.other = other.shape, other.dtype, other.device
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.other
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device)


def find_causal_lm(model: nn.Module) -> tuple[PreTrainedModel, nn.Module]:
    """The transformers model inside any wrappers, and its output head.

    Raises `UnsupportedModelError` if no transformers model with output embeddings is inside.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            try:
                head = module.get_output_embeddings()
            except (AttributeError, NotImplementedError):
                head = None
            if isinstance(head, nn.Module):
                return module, head
    raise UnsupportedModelError(
        f"{type(model).__name__} holds no transformers model with output embeddings, so there are "
        "no token log-probabilities; pass a causal language model"
    )


def over_chunks(function: Callable[..., Tensor], columns: tuple[Tensor, ...], rows: int) -> Tensor:
    """`function` over slices of at most `rows` rows of every column, checkpointed, joined again."""
    parts = []
    for pieces in zip(*(column.split(rows) for column in columns), strict=True):
        if torch.is_grad_enabled():
            # No random numbers are drawn in a head or a log-softmax: no state to keep.
            part = checkpoint(function, *pieces, use_reentrant=False, preserve_rng_state=False)
        else:
            part = function(*pieces)
        parts.append(part)
    return torch.cat(parts)


_rules: weakref.WeakKeyDictionary[nn.Module, AfterHead | None] = weakref.WeakKeyDictionary()
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_new_lock = threading.Lock()


#: Names under which configurations keep the softcap of their logits (Gemma; Griffin; xLSTM).
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def _softcap(causal_lm: PreTrainedModel) -> float | None:
    config = causal_lm.config.get_text_config()
    values = (getattr(config, name, None) for name in SOFTCAPS)
    return next((float(value) for value in values if value), None)


def _first_rule(causal_lm: PreTrainedModel) -> AfterHead:
    """A guess from the configuration; what the model returns decides."""
    config = causal_lm.config.get_text_config()
    factor = 1.0
    if isinstance(scale := getattr(config, "logit_scale", None), float | int) and scale:
        factor = float(scale)
    if isinstance(divisor := getattr(config, "logits_scaling", None), float | int) and divisor:
        factor = 1.0 / float(divisor)
    return AfterHead(factor, _softcap(causal_lm))


def _fit(causal_lm: PreTrainedModel, state: _Pass) -> AfterHead | None:
    raw, returned = state.raw, state.returned
    if raw is None or returned is None or raw.shape != returned.shape:
        return None
    wide, got = raw.double(), returned.double()
    factor = float((wide * got).sum() / wide.square().sum().clamp_min(1e-30))
    softcap = _softcap(causal_lm)
    for rule in (AfterHead(), AfterHead(softcap=softcap), AfterHead(factor)):
        if rule.explains(raw, returned):
            return rule
    return None


@contextmanager
def _replaced(module: nn.Module, make: Callable[[Any], Any]) -> Iterator[None]:
    """`module.forward` replaced for the calling thread; exactly what was there comes back."""
    missing = object()
    before = vars(module).get("forward", missing)
    original, thread = module.forward, threading.get_ident()
    replacement = make(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return replacement(*args, **kwargs)

    # DDP and PEFT look at the signature of forward.
    forward.__wrapped__ = original  # type: ignore[attr-defined]
    # Compiled models break their graph here: the head's chunks are not part of it.
    vars(module)["forward"] = torch._dynamo.disable(forward, recursive=False)
    try:
        yield
    finally:
        if before is missing:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = before


def _run(
    model: nn.Module,
    inputs: dict[str, Any],
    causal_lm: PreTrainedModel,
    head: nn.Module,
    keep: Tensor,
    columns: tuple[Tensor, ...],
    per_chunk: PerChunk,
    chunk_bytes: int,
    rule: AfterHead | None,
) -> tuple[Tensor, _Pass]:
    """One forward of `model`; `rule` None takes the model's own full logits."""
    state = _Pass()

    def selected(values: Tensor) -> Tensor:
        flat = values.reshape(-1, values.shape[-1])
        return flat if keep.numel() == flat.shape[0] else flat.index_select(0, keep)

    def make_head(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            state.head_calls += 1
            plain = isinstance(hidden, Tensor) and not args and not kwargs
            if not plain or hidden.shape[:-1] != inputs["input_ids"].shape:
                state.head_calls = 2  # not a head as this module knows it: explained by nothing
                return original(hidden, *args, **kwargs)
            tokens = selected(hidden)
            with torch.no_grad():
                raw = original(tokens[None, :PROBES])
            state.raw = raw.detach().clone()
            rows = max(1, chunk_bytes // (4 * raw.shape[-1]))

            def chunk(piece: Tensor, *rest: Tensor) -> Tensor:
                assert rule is not None
                return per_chunk(rule(original(piece[None])[0].float()), *rest)

            state.results = over_chunks(chunk, (tokens, *columns), rows)
            return _Tie.apply(raw, state.results)  # type: ignore[no-any-return]

        return forward

    def make_model(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            logits = getattr(output, "logits", None)
            if not isinstance(logits, Tensor):
                raise UnsupportedModelError(
                    f"{type(causal_lm).__name__} returned no logits; call it with return_dict=True"
                )
            if state.results is not None:
                state.returned = logits.detach()
                output.logits = _Tie.apply(state.results, logits)
            elif rule is None:
                if logits.shape[:-1] != inputs["input_ids"].shape:
                    raise UnsupportedModelError(
                        f"{type(causal_lm).__name__} returned logits of shape "
                        f"{tuple(logits.shape)} for tokens {tuple(inputs['input_ids'].shape)}; "
                        "there must be one row of logits for each token"
                    )
                rows = max(1, chunk_bytes // (4 * logits.shape[-1]))
                output.logits = over_chunks(
                    lambda piece, *rest: per_chunk(piece.float(), *rest),
                    (selected(logits), *columns),
                    rows,
                )
            return output

        return forward

    with _new_lock:
        lock = _locks.setdefault(causal_lm, threading.RLock())
    with lock, _replaced(causal_lm, make_model):
        if rule is None:
            return model(**inputs).logits, state
        with _replaced(head, make_head):
            return model(**inputs).logits, state


def per_token(
    model: nn.Module,
    inputs: dict[str, Any],
    keep: Tensor,
    columns: tuple[Tensor, ...],
    per_chunk: PerChunk,
    *,
    chunk_bytes: int,
) -> Tensor:
    """`per_chunk` over the logits of chosen tokens, with gradients, a chunk of logits at a time.

    Args:
        model: a causal language model of transformers, in any wrappers (PEFT, DDP, FSDP2).
        inputs: keyword arguments of the forward; `input_ids` is `[B, T]`.
        keep: int64 `[n]`, increasing indices into the flattened `[B * T]` tokens; n >= 1.
        columns: tensors `[n, ...]` given to `per_chunk` beside the logits of their tokens.
        per_chunk: `(logits float32 [m, V], *columns [m, ...]) -> [m, k]`; runs again in backward.
        chunk_bytes: largest size of one chunk of float32 logits in bytes; `per_chunk` and its
            backward hold a few tensors of that size at once.

    Returns:
        `[n, k]`.

    Raises:
        UnsupportedModelError: no output embeddings, or not one row of logits for each token.
    """
    causal_lm, head = find_causal_lm(model)
    rest = (causal_lm, head, keep, columns, per_chunk, chunk_bytes)
    rule = _rules.get(causal_lm, _first_rule(causal_lm))
    for _ in range(2):
        if rule is None:
            break
        results, state = _run(model, inputs, *rest, rule)
        if state.head_calls == 1 and state.raw is not None and state.returned is not None:
            if rule.explains(state.raw, state.returned):
                _rules[causal_lm] = rule
                return results
            rule = _fit(causal_lm, state)
        else:
            rule = None
    _rules[causal_lm] = None
    warn_once(
        f"{type(causal_lm).__name__} changes its logits after the head in a way that is not "
        "understood: its full logits are held in memory"
    )
    return _run(model, inputs, *rest, None)[0]

"""Per-token log-probabilities of the dense policy and of the policy under a rollout's evictions."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .token_head import find_causal_lm, per_token

if TYPE_CHECKING:
    from ..trace import EvictionTrace


class RolloutLogprobs(NamedTuple):
    """Both float32 `[B, N]` in nats, 0 where a token or the one before it is padding.

    Entry n belongs to the token of column `completion_start + n` (column n + 1 without it).
    """

    logprobs: Tensor
    #: Entropy of the distribution that the token was drawn from, or None if not asked for.
    entropy: Tensor | None


def token_statistics(logits: Tensor, targets: Tensor, temperature: float, entropy: bool) -> Tensor:
    """Log-probability (and entropy) of `targets` int64 `[n]` under float32 logits `[n, V]`.

    Returns float32 `[n, 1]`, or `[n, 2]` with entropies.
    """
    logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return logprobs[:, None]
    probabilities = (logits - normaliser[:, None]).exp()
    # A logit of minus infinity has probability 0 and no share in the entropy, not NaN.
    finite = logits.masked_fill(logits.isneginf(), 0.0)
    return torch.stack((logprobs, normaliser - (probabilities * finite).sum(-1)), -1)


def _check(
    sequences: Tensor,
    trace: EvictionTrace | None,
    attention_mask: Tensor | None,
    completion_start: int | None,
    temperature: float,
    chunk_bytes: int,
) -> None:
    if sequences.ndim != 2 or sequences.dtype != torch.int64 or sequences.shape[0] == 0:
        raise ValueError(
            f"sequences must be int64 [batch, tokens], got {sequences.dtype} "
            f"{tuple(sequences.shape)}"
        )
    length = sequences.shape[1]
    if length < 2:
        raise ValueError(f"sequences must have at least 2 columns to predict one, got {length}")
    if attention_mask is not None and attention_mask.shape != sequences.shape:
        raise ValueError(
            f"attention_mask must have the shape {tuple(sequences.shape)} of sequences, got "
            f"{tuple(attention_mask.shape)}"
        )
    if completion_start is not None and not 1 <= completion_start < length:
        raise ValueError(
            f"completion_start must be a column from 1 to {length - 1}, got {completion_start}"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a finite number above 0, got {temperature}")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    if trace is not None and trace.batch_size != sequences.shape[0]:
        raise ValueError(
            f"trace has {trace.batch_size} rows and sequences {sequences.shape[0]}; "
            "pass the sequences of the same rollout"
        )


def rollout_logprobs(
    model: nn.Module,
    sequences: Tensor,
    trace: EvictionTrace | None = None,
    *,
    attention_mask: Tensor | None = None,
    completion_start: int | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_bytes: int = 2**28,
) -> RolloutLogprobs:
    """Log-probabilities of the tokens of `sequences`, each given the tokens before it.

    Differentiable, and logits are never held for all tokens at once (see `token_head`).

    Args:
        model: a causal language model of transformers, in any wrappers (PEFT, DDP, FSDP2).
        sequences: int64 `[B, T]`, prompt and completion.
        trace: the evictions of the rollout, for the policy under the budget; None is the dense
            policy.
        attention_mask: `[B, T]`, 0 for padding.
        completion_start: first column whose log-probability is wanted, from 1; None is all, from 1.
        temperature: what sampling divided logits by; above 0.
        entropy: also give the entropy at every token.
        chunk_bytes: largest size of a chunk of float32 logits, in bytes.

    Raises:
        ValueError: a shape, dtype, column or temperature that does not fit.
        UnsupportedModelError: a model without one row of logits for each token.
    """
    _check(sequences, trace, attention_mask, completion_start, temperature, chunk_bytes)
    start = 1 if completion_start is None else completion_start
    batch, length = sequences.shape
    causal_lm, _ = find_causal_lm(model)
    inputs: dict[str, Any] = {"input_ids": sequences, "use_cache": False}
    real = torch.ones_like(sequences, dtype=torch.bool)
    if attention_mask is not None:
        real = attention_mask.to(sequences.device) != 0
        inputs["attention_mask"] = attention_mask
        if "position_ids" in inspect.signature(causal_lm.forward).parameters:
            inputs["position_ids"] = (real.long().cumsum(-1) - 1).clamp_min(0)
    counted = real[:, start:] & real[:, start - 1 : -1]
    # Where nothing counts, one token still goes through the head: ranks must do the same work.
    chosen = counted.clone()
    chosen[0, 0] |= ~counted.any()
    row, column = chosen.nonzero(as_tuple=True)
    keep = row * length + column + start - 1
    targets = sequences[row, column + start]

    context: Any = nullcontext()
    if trace is not None:
        from . import replay

        context = replay(model, trace)
    with context:
        values = per_token(
            model,
            inputs,
            keep,
            (targets,),
            lambda logits, wanted: token_statistics(logits, wanted, temperature, entropy),
            chunk_bytes=chunk_bytes,
        )
    full = values.new_zeros(batch, length - start, values.shape[-1]).index_put(
        (row, column), values
    )
    full = full.masked_fill(~counted[..., None], 0.0)
    return RolloutLogprobs(full[..., 0], full[..., 1] if entropy else None)

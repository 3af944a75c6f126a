"""Log-probabilities of sampled tokens, under the dense policy or that of a cache's trace."""

from __future__ import annotations

import contextlib
import inspect
import math
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from ..trace import EvictionTrace
from .context import check_not_under_replay, check_way, positions_of, replay
from .token_head import read_logits, with_head

CHUNK_BYTES = 128 * 2**20
_LEAST_TEMPERATURE = 1e-6
"""Below it logits divided by it leave float32."""


class RolloutLogprobs(NamedTuple):
    """What `rollout_logprobs` returns."""

    logprobs: torch.Tensor
    """`[B, T - start]` float32, nats: of the token in each column given those before it; 0 for
    padding and for a row's first token."""
    entropy: torch.Tensor | None
    """`[B, T - start]` float32, nats: of the distribution that the token was drawn from; 0 in the
    same places. None if it was not asked for."""


def rollout_logprobs(
    model: torch.nn.Module,
    sequences: torch.Tensor,
    trace: EvictionTrace | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    start: int = 1,
    temperature: float = 1.0,
    entropy: bool = False,
    way: str = "auto",
    chunk_bytes: int = CHUNK_BYTES,
) -> RolloutLogprobs:
    """Log-probabilities of tokens, with gradients, without holding the logits of all of them.

    ```python
    sampled = rollout_logprobs(model, sequences, trace).logprobs    # the policy that was sampled
    dense = rollout_logprobs(model, sequences).logprobs             # the same weights, all tokens
    mismatch = dense - sampled                                      # log of the importance ratio
    ```

    The model runs once. Its language head then runs on chunks of tokens, again in the backward, so
    that no tensor of all tokens and the whole vocabulary exists in either. A compiled model runs
    uncompiled here. Positions are those that `generate` gives.

    Args:
        model: a causal language model of transformers, or a module around one (LoRA, DDP, FSDP).
        sequences: `[B, T]` int64, prompt and completion.
        trace: what the sampler's cache evicted, see [`replay`]; None: the dense policy.
        attention_mask: `[B, T]`, 0 for padding; None: there is none.
        start: first column whose token is asked for, 1 to `T - 1`: the length of the (padded)
            prompt gives the completion.
        temperature: logits are divided by it, as in sampling; at least 1e-6.
        entropy: whether to return it too.
        way: of [`replay`].
        chunk_bytes: most bytes of a chunk of logits in float32. About four such tensors exist at a
            time in the backward.

    Raises:
        TypeError, ValueError: an argument makes no sense; the message says what would.
        UnsupportedModelError: the model has no language head, or cannot be replayed exactly.
        RuntimeError: it is called inside of a [`replay`] of the model.
    """
    _check(sequences, attention_mask, start, temperature, chunk_bytes)
    check_way(way)
    check_not_under_replay(model)
    inner = with_head(model)
    mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
    flat = sequences[:, start:].flatten()

    def of_chunk(logits: torch.Tensor, where: slice) -> torch.Tensor:
        if temperature != 1.0:
            logits = logits / temperature
        # One tensor of the chunk's size fewer than log_softmax.
        total = logits.logsumexp(-1, keepdim=True)
        wanted = [logits.gather(-1, flat[where, None].to(logits.device)) - total]
        if entropy:
            logs = logits - total
            wanted.append(-(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1, True))
        return torch.cat(wanted, dim=-1)

    real = mask != 0
    inputs: dict[str, Any] = {"input_ids": sequences, "attention_mask": mask, "use_cache": False}
    if "position_ids" in inspect.signature(inner.forward).parameters:
        inputs["position_ids"] = positions_of(real)
    under = contextlib.nullcontext() if trace is None else replay(model, trace, way=way)
    # Padding may lie between a token and the one before it, in whose column its logits are.
    columns = torch.arange(sequences.shape[1], device=real.device)
    before = torch.where(real, columns, -1).cummax(-1).values[:, start - 1 : -1]
    known = real[:, start:] & (before >= 0)
    has_holes = bool((known & (before != columns[start - 1 : -1])).any())
    read = before.clamp(min=0) if has_holes else slice(start - 1, -1)
    with under:
        found = read_logits(model, of_chunk, read, chunk_bytes=chunk_bytes, **inputs)
    # Not by a product: padding may have any logits, also infinite ones.
    found = found.masked_fill(~known[..., None].to(found.device), 0.0)
    return RolloutLogprobs(found[..., 0], found[..., 1] if entropy else None)


def _check(
    sequences: torch.Tensor,
    attention_mask: torch.Tensor | None,
    start: int,
    temperature: float,
    chunk_bytes: int,
) -> None:
    if not isinstance(sequences, torch.Tensor) or sequences.dtype != torch.int64:
        found = getattr(sequences, "dtype", type(sequences).__name__)
        raise TypeError(f"sequences must be an int64 tensor of token ids, got {found}.")
    if sequences.dim() != 2 or sequences.shape[1] < 2 or not len(sequences):
        raise ValueError(
            f"sequences must be [B, T] with at least 2 tokens, got {list(sequences.shape)}."
        )
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor):
            found = type(attention_mask).__name__
            raise TypeError(f"attention_mask must be a tensor, got {found}.")
        if attention_mask.shape != sequences.shape:
            raise ValueError(
                f"attention_mask must have the shape of sequences, {list(sequences.shape)}, got "
                f"{list(attention_mask.shape)}."
            )
    for name, number in (("start", start), ("chunk_bytes", chunk_bytes)):
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise TypeError(f"{name} must be an int, got {number!r}; pass a whole number.")
    if not 1 <= start < sequences.shape[1]:
        raise ValueError(
            f"start={start} must lie between 1 and {sequences.shape[1] - 1}: the first token has "
            "no probability."
        )
    if isinstance(temperature, bool) or not isinstance(temperature, Real):
        raise TypeError(f"temperature must be a float, got {temperature!r}.")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature={temperature} must be positive and finite: greedy answers have no "
            "distribution that they were sampled from."
        )
    if temperature < _LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature} is below {_LEAST_TEMPERATURE:g}, where logits divided by "
            "it overflow; such sampling is greedy, so there is no distribution to compare with."
        )
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes={chunk_bytes} must be positive.")

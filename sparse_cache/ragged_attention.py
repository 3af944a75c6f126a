"""Attention whose KV heads see different numbers of stored tokens, for more than one query."""

from __future__ import annotations

from typing import Any

import torch

from .attention_arguments import sinks_of, softcap_of, unknown_arguments
from .errors import UnsupportedModelError


def checked_arguments(
    allocation: str, rest: tuple[Any, ...], arguments: dict[str, Any]
) -> dict[str, Any]:
    """What attention is to compute: `softcap` and `sinks`, where given.

    Args:
        allocation: for the message.
        rest: attention's positional arguments behind the mask.
        arguments: its keyword arguments.

    Raises:
        UnsupportedModelError: an argument that asks for anything else.
    """
    others = unknown_arguments(rest, arguments)
    if others:
        raise UnsupportedModelError(
            f"{allocation} computes attention itself and does not know how to serve "
            f"{', '.join(sorted(others))}; call the model without or use allocation='uniform'."
        )
    return {"softcap": softcap_of(arguments), "sinks": sinks_of(arguments)}


def padded_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention under a mask of each KV head's own.

    Args:
        query: `[B, Hq, T, D]`.
        keys: `[B, H, S, D]`, query head `h` reads KV head `h // (Hq // H)`.
        values: `[B, H, S, Dv]`.
        mask: `[B or 1, 1 or H, T, S]`, boolean (True: visible) or additive; None: all is visible.
        scaling: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sinks: `[Hq]` extra logits in the denominator (gpt-oss).

    Returns:
        `[B, Hq, T, Dv]` in the dtype of the query. Softmax is in float32 where softcap or sinks ask
        for a computation written out, else it is SDPA's.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    mask = mask_of_queries(mask, group)
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling
        )
    logits = query.float() @ keys.float().transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    elif mask is not None:
        logits = logits + mask.float()
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, extra], dim=-1)
    probabilities = logits.softmax(dim=-1)[..., : keys.shape[2]]
    return (probabilities @ values.float()).to(query.dtype)


def mask_of_queries(mask: torch.Tensor | None, group: int) -> torch.Tensor | None:
    """`[B, 1 or Hq, T, S]` from a mask `[B, 1 or H, T, S]`."""
    if mask is None or mask.shape[1] == 1:
        return mask
    return mask.repeat_interleave(group, dim=1)


def is_plain(
    output: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    real: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> bool:
    """Whether a model's attention gave its newest token what softmax attention gives.

    Args:
        output: what the attention function returned for the arguments below.
        query: `[B, Hq, T, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, Dv]`.
        mask: None (causal) or `[B, 1, T, S]`, boolean or additive; other masks are not plain.
        real: `[B]` boolean, False for rows whose newest token is padding; None: all are real.
        scaling, softcap, sinks: as for `padded_attention`.
    """
    shared = isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1] == 1
    theirs = output[0] if isinstance(output, tuple) else output
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    if not (mask is None or shared) or getattr(theirs, "shape", None) != shape:
        return False
    with torch.no_grad():
        seen = None if mask is None else mask[:, :, -1:, : key.shape[2]]
        mine = padded_attention(
            query[:, :, -1:], key, value, seen, scaling=scaling, softcap=softcap, sinks=sinks
        )[:, :, 0]
        theirs = theirs[:, -1]
        if real is not None:
            mine, theirs = mine[real], theirs[real]
        if not theirs.numel():
            return True
        scale = theirs.abs().amax().float()
        tolerance = 1e-3 if query.dtype in (torch.float32, torch.float64) else 5e-2
        far = (mine.float() - theirs.float()).abs().amax() > tolerance * scale + 1e-6
        # NaN on both sides is reported where it comes from, by the first eviction.
        return not bool(far)

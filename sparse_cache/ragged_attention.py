"""Attention whose KV heads see different numbers of stored tokens, for more than one query."""

from __future__ import annotations

from typing import Any

import torch

from .errors import UnsupportedModelError

_IGNORED = frozenset(
    {
        "cache_position",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that models pass on to attention and that change nothing there."""


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
    known = {"scaling", "softcap", "s_aux", "sinks", "is_causal", "dropout"}
    others = {
        name
        for name, value in arguments.items()
        if name not in known | _IGNORED and value is not None and value is not False
    }
    if arguments.get("is_causal") is False:
        others.add("is_causal=False")
    if arguments.get("dropout"):
        others.add(f"dropout={arguments['dropout']}")
    if rest:
        others.add("positional arguments")
    if others:
        raise UnsupportedModelError(
            f"{allocation} computes attention itself and does not know how to serve "
            f"{', '.join(sorted(others))}; call the model without or use allocation='uniform'."
        )
    found = {"softcap": arguments.get("softcap")}
    sinks = arguments.get("s_aux")
    found["sinks"] = arguments.get("sinks") if sinks is None else sinks
    return found


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

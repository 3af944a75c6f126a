"""Replay by a mask `[B, heads, T, T]`: the plain truth, for short sequences and any attention."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedModelError


def visible_tokens(deaths: torch.Tensor) -> torch.Tensor:
    """`[B, H, T, T]` boolean: which key each query sees, from deaths `[B, H, T]`.

    A query that sees nothing sees itself, so that its softmax is defined; only padding is such.
    """
    column = torch.arange(deaths.shape[2], device=deaths.device)
    query, key = column[:, None], column[None, :]
    visible = (key <= query) & (query < deaths[:, :, None, :])
    return visible | ((key == query) & ~visible.any(-1, keepdim=True))


def mask_under(
    mask: Any, deaths: torch.Tensor, query_heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """The model's own mask and what the deaths hide, together.

    Args:
        mask: None (causal), or `[B or 1, heads or 1, T, T]`, boolean (True: visible) or additive.
        deaths: `[B, H, T]`.
        query_heads: heads that the mask is for, a multiple of `H`.
        dtype: of an additive mask that is made where there was none.

    Returns:
        `[B, query_heads or 1, T, T]`, boolean where `mask` is, else additive.

    Raises:
        UnsupportedModelError: a mask that is not made of numbers for each query and key.
    """
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4):
        raise UnsupportedModelError(
            "way='dense' needs masks with a number for each query and key, which this attention "
            "implementation does not have; load the model with attn_implementation='sdpa'."
        )
    visible = visible_tokens(deaths)
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(query_heads // visible.shape[1], dim=1)
    length = visible.shape[-1]
    if mask is not None and mask.dtype == torch.bool:
        both = visible & mask[..., :length]
        alone = torch.eye(length, dtype=torch.bool, device=both.device)
        return both | (alone & ~both.any(-1, keepdim=True))
    lowest = torch.finfo(dtype if mask is None else mask.dtype).min
    if mask is None:
        hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    else:
        visible, hidden = torch.broadcast_tensors(visible, mask[..., :length])
    return hidden.masked_fill(~visible, lowest)

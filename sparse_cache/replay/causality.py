"""Whether the mask of a layer is the causal one, which is all that a trace speaks of."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask

from ..errors import UnsupportedModelError

_LATER = (
    "a mask of the model lets tokens see later ones, as those of an image do, which a trace cannot "
    "tell of; replay serves rollouts of causal attention alone."
)
_FEWER = (
    "a mask of the compiled model hides more than later tokens and padding; replay it with "
    "way='dense', or uncompiled."
)
_HIDDEN = -1000.0
"""What is added to a logit from which on nothing is left of the token's weight."""


def hides_more(mask: Any, deaths: torch.Tensor, *, matters: bool) -> bool:
    """Whether a mask hides more than later tokens and padding.

    Args:
        mask: what transformers made: None (causal), a tensor `[B or 1, heads or 1, T, T]`, a
            `BlockMask`, or what says nothing of single queries and keys.
        deaths: `[B, H, T]`, 0 for padding.
        matters: whether somebody asks. Compiled code cannot be told, so there it then is an error
            that it does.

    Raises:
        UnsupportedModelError: it lets a token see a later one. Compiled code raises RuntimeError.
    """
    batch, _, length = deaths.shape
    if isinstance(mask, BlockMask):
        device = str(deaths.device)
        mask = create_mask(mask.mask_mod, batch, 1, length, length, device)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return False
    visible = mask[..., :length] if mask.dtype == torch.bool else mask[..., :length] > _HIDDEN
    real = deaths[:, :1] != 0
    real = real[..., None] & real[..., None, :]
    later = (visible & real).triu(1).any()
    fewer = (~visible & real).tril().any()
    if torch.compiler.is_dynamo_compiling():
        torch._assert_async(~later, _LATER)
        if matters:
            torch._assert_async(~fewer, _FEWER)
        return False
    if bool(later):
        raise UnsupportedModelError(_LATER)
    return bool(fewer)

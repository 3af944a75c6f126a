"""A decoding step's attention by our own kernel, in place of the model's attention function.

It reads the stored tokens of each row and head and nothing else, without a mask and without
repeating KV heads, and adds each key's attention probability to the policy's score on the way.
"""

from __future__ import annotations

from typing import Any

import torch

from .attention_arguments import sinks_of, softcap_of
from .kernels.decode_attention import decode_attention

LARGEST_HEAD = 256
"""Head size up to which the kernel is compiled."""


def attend_step(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    arguments: dict[str, Any],
    *,
    scaling: float,
    mass: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Attention of one query token of every row, as transformers' attention functions return it.

    Args:
        query: `[B, Hq, 1, D]`.
        keys: `[B, H, C, D]` by slot.
        values: `[B, H, C, Dv]`.
        lengths: `[B]` int32: slots in use, that of the query's own token included.
        arguments: the keyword arguments of attention.
        scaling: factor of the logits.
        key_scales, value_scales: `[B, H, C]` float32, factors of int8 keys and values.
        mass: `[B, H, C]` float32, to which each key's attention probability is added in place.

    Returns:
        `[B, 1, Hq, Dv]`, and None for the attention weights.
    """
    output, _ = decode_attention(
        query,
        keys,
        values,
        lengths,
        scaling=scaling,
        softcap=softcap_of(arguments),
        sinks=sinks_of(arguments),
        key_scales=key_scales,
        value_scales=value_scales,
        mass=mass,
        implementation="triton",
    )
    return output.transpose(1, 2).contiguous(), None

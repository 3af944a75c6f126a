"""Replay by FlexAttention, with the block mask built from the deaths themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_BLOCK = 128


def block_mask(deaths: torch.Tensor, query_heads: int) -> BlockMask:
    """Which blocks of 128 queries and 128 keys attention can skip, and which need no mask.

    Nothing of size `[T, T]` is made: a block's queries and keys are ranges of columns, so the least
    and the greatest death among its keys say whether all or none of it is visible.

    Args:
        deaths: `[B, H, T]` int32.
        query_heads: a multiple of `H`.
    """
    batch, heads, length = deaths.shape
    group = query_heads // heads
    blocks = math.ceil(length / _BLOCK)
    padded = torch.nn.functional.pad(deaths, (0, blocks * _BLOCK - length))
    by_block = padded.view(batch, heads, blocks, _BLOCK)
    first = torch.arange(blocks, device=deaths.device) * _BLOCK
    last = first + _BLOCK - 1
    past = first[None, :] <= last[:, None]
    some = past & (by_block.amax(-1)[:, :, None, :] > first[:, None])
    every = (last[None, :] <= first[:, None]) & (by_block.amin(-1)[:, :, None, :] > last[:, None])
    some, every = (
        tensor.repeat_interleave(group, dim=1) for tensor in (some & ~every, every & some)
    )

    def is_visible(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (query < deaths[row, head // group, key])

    return BlockMask.from_kv_blocks(
        *_listed(some),
        *_listed(every),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(length, length),
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `[..., Q, K]` boolean: how many are True in each line, and their indices first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int().contiguous()


@functools.cache
def _fused() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def flex_replay(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: BlockMask,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention `[B, Hq, T, Dv]` under `blocks`.

    On a CPU it runs unfused and without gradients, as FlexAttention does there. See
    https://pytorch.org/blog/flexattention/.

    Args:
        query: `[B, Hq, T, D]`.
        key: `[B, H, T, D]`.
        value: `[B, H, T, Dv]`.
        blocks: from `block_mask`.
        scaling: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sinks: `[Hq]` extra logits in the denominator (gpt-oss).

    Raises:
        NotImplementedError: gradients are wanted on a CPU.
    """

    def capped(score: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    attend: Any = _fused() if query.device.type == "cuda" else flex_attention
    output, log_sum_exp = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=blocks,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=True,
    )
    if sinks is not None:
        # A sink is one more term of the denominator.
        share = torch.sigmoid(log_sum_exp - sinks.float()[None, :, None])
        output = (output.float() * share[..., None]).to(query.dtype)
    return output

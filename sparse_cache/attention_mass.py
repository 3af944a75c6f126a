"""Attention probability received by each key, for policies that accumulate it."""

from __future__ import annotations

import torch

QUERY_BLOCK = 256
"""Queries handled at once, so that a long prompt needs no [T, S] matrix per head."""


def attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    real_queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention probability that each key receives from a chunk of queries.

    Args:
        query: `[B, Hq, T, D]`.
        key: `[B, H, S, D]`, `Hq` a multiple of `H`; the last `T` keys are the queries' own.
        attention_mask: what attention was given: None (causal), or `[B, 1 or Hq, T, S]`, boolean
            (True: visible) or additive.
        scaling: factor of the logits.
        softcap: logits become `softcap * tanh(logits / softcap)` (Gemma 2).
        sinks: `[Hq]` extra logits in the denominator (gpt-oss).
        real_queries: `[B, T]` boolean, False for padding queries, which give no mass.

    Returns:
        `[B, H, S]` float32: summed over queries, averaged over the query heads of a group.
    """
    batch, query_heads, chunk, _ = query.shape
    kv_heads, stored = key.shape[1], key.shape[2]
    group = query_heads // kv_heads
    total = torch.zeros(batch, kv_heads, stored, dtype=torch.float32, device=key.device)
    keys = key.float().transpose(-1, -2).unsqueeze(2)
    for start in range(0, chunk, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, chunk)
        block = query[:, :, start:stop].float().unflatten(1, (kv_heads, group))
        logits = (block @ keys * scaling).flatten(1, 2)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if attention_mask is None:
            own = torch.arange(start, stop, device=key.device) + stored - chunk
            hidden = torch.arange(stored, device=key.device) > own[:, None]
            logits = logits.masked_fill(hidden, float("-inf"))
        elif attention_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attention_mask[:, :, start:stop], float("-inf"))
        else:
            logits = logits + attention_mask[:, :, start:stop].float()
        if sinks is not None:
            extra = sinks.float().view(1, -1, 1, 1).expand(batch, -1, stop - start, 1)
            logits = torch.cat([logits, extra], dim=-1)
        # A query that sees nothing (padding) gives NaN, which is no mass.
        probabilities = logits.softmax(dim=-1)[..., :stored].nan_to_num(0.0)
        if real_queries is not None:
            probabilities = probabilities * real_queries[:, None, start:stop, None]
        total += probabilities.unflatten(1, (kv_heads, group)).sum(dim=3).mean(dim=2)
    return total

"""The truth: softmax over a `[B, Hq, T, T]` matrix in which evicted tokens are masked."""

from __future__ import annotations

import torch


def replay_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `api.replay_attention`; the gradient is autograd's. float64 stays float64."""
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    column = torch.arange(query.shape[2], device=query.device)
    deaths = deaths.expand(-1, key.shape[1], -1)
    visible = (column[None, :] <= column[:, None]) & (column[:, None] < deaths[:, :, None, :])
    visible = visible & (deaths > 0)[..., None]
    visible = visible.repeat_interleave(group, dim=1)
    # Nothing of a padding column may reach the sums, not even 0 * NaN.
    padding = (deaths == 0)[..., None]
    keys = key.to(wide).masked_fill(padding, 0).repeat_interleave(group, dim=1)
    values = value.to(wide).masked_fill(padding, 0).repeat_interleave(group, dim=1)
    queries = query.to(wide).masked_fill(padding.repeat_interleave(group, dim=1), 0)
    logits = queries @ keys.transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    top = logits.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(wide)[None, :, None, None]
        top = torch.maximum(top, sink.detach())
    weights = (logits - top.clamp(min=torch.finfo(wide).min)).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink - top).exp()
    # A query that sees nothing, and has no sink, gets zeros.
    total = total.masked_fill(total == 0, 1)
    return (weights @ values / total).to(query.dtype)

"""What `replay_attention` refuses."""

from __future__ import annotations

import math

import torch


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
) -> None:
    """Raise TypeError or ValueError for tensors that do not go together."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.dtype.is_floating_point or tensor.dtype != query.dtype:
            raise TypeError(
                f"{name} must have the floating dtype of the query, got {tensor.dtype} beside "
                f"{query.dtype}."
            )
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [B, heads, T, D], got {list(tensor.shape)}.")
    batch, query_heads, length, size = query.shape
    heads = key.shape[1]
    if key.shape[:1] + key.shape[2:] != (batch, length, size):
        raise ValueError(
            f"key must be [{batch}, H, {length}, {size}] for this query, got {list(key.shape)}."
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must be [{batch}, {heads}, {length}, Dv] for this key, got {list(value.shape)}."
        )
    if heads == 0 or query_heads % heads:
        raise ValueError(f"query has {query_heads} heads, which {heads} KV heads do not divide.")
    if deaths.dtype != torch.int32:
        raise TypeError(f"deaths must be int32, got {deaths.dtype}.")
    if (
        deaths.dim() != 3
        or deaths.shape[1] not in (1, heads)
        or (deaths.shape[0], deaths.shape[2]) != (batch, length)
    ):
        raise ValueError(
            f"deaths must be [{batch}, {heads} or 1, {length}], got {list(deaths.shape)}."
        )
    if sinks is not None and sinks.shape != (query_heads,):
        raise ValueError(f"sinks must be [{query_heads}], got {list(sinks.shape)}.")
    if sinks is not None and not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks must be of a floating dtype, got {sinks.dtype}.")
    if not -math.inf < scaling < math.inf:
        raise ValueError(f"scaling={scaling} must be finite.")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be positive and finite, or None.")
    others = [key, value, deaths] + ([] if sinks is None else [sinks])
    if any(tensor.device != query.device for tensor in others):
        raise ValueError(
            f"all tensors must lie on the query's device {query.device}, got "
            f"{', '.join(str(tensor.device) for tensor in others)}."
        )
    # The host reads them anyway; compiled code cannot.
    if not torch.compiler.is_compiling() and bool((deaths < 0).any()):
        raise ValueError(f"deaths must not be negative, got {int(deaths.min())}; padding has 0.")

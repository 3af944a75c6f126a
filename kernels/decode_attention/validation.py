"""What `decode_attention` refuses, in one sentence that names the tensor."""

from __future__ import annotations

import math

import torch

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD_SIZE = 256


def check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    sinks: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    offsets: torch.Tensor | None,
    mass: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None,
) -> None:
    """Raise TypeError (dtype) or ValueError (shape, device, stride) for what no kernel may see."""
    for name, required, given in (
        ("query", True, query),
        ("keys", True, keys),
        ("values", True, values),
        ("lengths", True, lengths),
        ("sinks", False, sinks),
        ("key_scales", False, key_scales),
        ("value_scales", False, value_scales),
        ("offsets", False, offsets),
        ("mass", False, mass),
    ):
        if not isinstance(given, torch.Tensor) and (required or given is not None):
            raise TypeError(f"{name} must be a tensor; it is a {type(given).__name__}.")
    if isinstance(scaling, bool) or not isinstance(scaling, int | float):
        raise TypeError(f"scaling must be a number; it is {scaling!r}.")
    if not math.isfinite(scaling):
        raise ValueError(f"scaling must be finite; it is {scaling}.")
    if softcap is not None and (isinstance(softcap, bool) or not isinstance(softcap, int | float)):
        raise TypeError(f"softcap must be a number or None; it is {softcap!r}.")
    if query.dim() != 4 or query.shape[2] != 1:
        raise ValueError(f"query must be [B, Hq, 1, D]; it is {list(query.shape)}.")
    if query.dtype not in QUERY_DTYPES:
        raise TypeError(f"query must be float16, bfloat16 or float32; it is {query.dtype}.")
    batch, query_heads, _, size = query.shape
    for name, stored in (("keys", keys), ("values", values)):
        if stored.dim() != 4 or stored.shape[0] != batch:
            raise ValueError(
                f"{name} must be [B, H, C, head size] with the query's B = {batch}; it is "
                f"{list(stored.shape)}."
            )
        if stored.dtype not in (query.dtype, torch.int8):
            raise TypeError(
                f"{name} must be {query.dtype} like the query, or int8; it is {stored.dtype}."
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"values must have the B, H and C of keys, {list(keys.shape[:3])}; it has "
            f"{list(values.shape[:3])}."
        )
    if keys.dtype != values.dtype:
        raise TypeError(f"values must be {keys.dtype} like keys; it is {values.dtype}.")
    if keys.shape[3] != size:
        raise ValueError(f"keys must have the query's head size {size}; it has {keys.shape[3]}.")
    for name, each in (("keys", keys), ("values", values)):
        if not 1 <= each.shape[3] <= LARGEST_HEAD_SIZE:
            raise ValueError(
                f"{name} must have a head size from 1 to {LARGEST_HEAD_SIZE}; it has "
                f"{each.shape[3]}."
            )
    _check_heads(query_heads, keys, lengths, offsets)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None; it is {softcap}.")
    if sinks is not None:
        if sinks.shape != (query_heads,):
            raise ValueError(
                f"sinks must be [Hq] with the query's Hq = {query_heads}; it is "
                f"{list(sinks.shape)}."
            )
        if not sinks.is_floating_point():
            raise TypeError(f"sinks must be of a floating dtype; it is {sinks.dtype}.")
    quantised = keys.dtype == torch.int8
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if quantised != (scales is not None):
            raise ValueError(
                f"{name} must be given when keys and values are int8 and only then; they are "
                f"{keys.dtype}."
            )
    for name, by_slot in (
        ("key_scales", key_scales),
        ("value_scales", value_scales),
        ("mass", mass),
    ):
        if by_slot is None:
            continue
        if by_slot.shape != keys.shape[:3]:
            raise ValueError(
                f"{name} must be {list(keys.shape[:3])} like keys without its head size; it is "
                f"{list(by_slot.shape)}."
            )
        if by_slot.dtype != torch.float32:
            raise TypeError(f"{name} must be float32; it is {by_slot.dtype}.")
    for name, tensor in (
        ("query", query),
        ("keys", keys),
        ("values", values),
        ("sinks", sinks),
        ("key_scales", key_scales),
        ("value_scales", value_scales),
        ("mass", mass),
    ):
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension; its strides are "
                f"{list(tensor.stride())}."
            )
    if mass is not None and any(
        length > 1 and stride == 0 for length, stride in zip(mass.shape, mass.stride(), strict=True)
    ):
        raise ValueError("mass must have memory of its own for each key; it is an expanded tensor.")
    for name, tensor in (
        ("keys", keys),
        ("values", values),
        ("lengths", lengths),
        ("sinks", sinks),
        ("key_scales", key_scales),
        ("value_scales", value_scales),
        ("offsets", offsets),
        ("mass", mass),
    ):
        if tensor is not None and tensor.device != query.device:
            raise ValueError(
                f"{name} must be on the query's device {query.device}; it is on {tensor.device}."
            )


def check_lengths(lengths: torch.Tensor, offsets: torch.Tensor | None, capacity: int) -> None:
    """Check numbers inside of tensors, where reading them costs nothing: on the CPU."""
    if lengths.device.type != "cpu" or not lengths.numel():
        return
    first = torch.zeros_like(lengths, dtype=torch.int64) if offsets is None else offsets
    if int(lengths.min()) < 0 or int((first + lengths).max()) > capacity:
        where = "" if offsets is None else " behind its offset"
        raise ValueError(
            f"lengths must lie between 0 and the slots that keys has{where}, {capacity} in all; "
            f"they go from {int(lengths.min())} to {int(lengths.max())}."
        )
    if offsets is not None and int(offsets.min()) < 0:
        raise ValueError(f"offsets must not be negative; the least is {int(offsets.min())}.")


def _check_heads(
    query_heads: int, keys: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor | None
) -> None:
    batch, heads = keys.shape[:2]
    if lengths.dtype != torch.int32:
        raise TypeError(f"lengths must be int32; it is {lengths.dtype}.")
    if offsets is not None:
        if offsets.dtype != torch.int64:
            raise TypeError(f"offsets must be int64; it is {offsets.dtype}.")
        if offsets.dim() != 2 or offsets.shape[0] != batch:
            raise ValueError(
                f"offsets must be [B, H] with B = {batch}; it is {list(offsets.shape)}."
            )
        if heads != 1:
            raise ValueError(
                "keys must be [B, 1, P, D], one pool for all heads of a row, when offsets are "
                f"given; it is {list(keys.shape)}."
            )
        heads = offsets.shape[1]
        if lengths.shape != (batch, heads):
            raise ValueError(
                f"lengths must be {[batch, heads]} like offsets; it is {list(lengths.shape)}."
            )
    elif lengths.shape not in ((batch,), (batch, heads)):
        raise ValueError(
            f"lengths must be [B] or [B, H] = {[batch, heads]}; it is {list(lengths.shape)}."
        )
    if heads < 1 or query_heads % heads:
        raise ValueError(
            f"query must have a multiple of the {heads} KV heads as heads; it has {query_heads}."
        )

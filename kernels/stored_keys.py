"""The stored keys of all layers, as the scoring kernels take them: checks, and plain access."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_stored_keys(
    keys: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    stored: int,
    key_scales: Sequence[torch.Tensor] | None,
) -> None:
    """Refuse what a kernel over the stored keys of all layers could not read.

    Args:
        keys: one `[B, H, C, D]` a layer, by slot; float32, float16, bfloat16 or int8. Only `C`
            may differ between layers.
        order: one `[B, H, C]` int32 a layer, the slot of the i-th oldest token; None: slot i.
        lengths: `[L, B, H]` int32, tokens stored; the values are not looked at.
        stored: most tokens stored by any head.
        key_scales: one `[B, H, C]` float32 a layer, for int8 keys only.

    Raises:
        TypeError: a dtype is wrong, or something is no tensor.
        ValueError: a shape, stride or device is wrong, or a list has a wrong length.
    """
    if not keys:
        raise ValueError("keys must hold one tensor [B, H, C, D] a layer, and it is empty.")
    first = keys[0]
    for layer, each in enumerate(keys):
        check_tensor(f"keys[{layer}]", each, 4, (*FLOATS, torch.int8), first.device)
        if each.dtype != first.dtype:
            raise TypeError(
                f"keys[{layer}] must be {first.dtype} like keys[0], and it is {each.dtype}."
            )
        if each.shape[:2] != first.shape[:2] or each.shape[3] != first.shape[3]:
            raise ValueError(
                f"keys[{layer}] must have the rows, heads and head size of keys[0], "
                f"{tuple(first.shape)} but for dimension 2, and it is {tuple(each.shape)}."
            )
        check_rows_contiguous(f"keys[{layer}]", each)
    check_tensor("lengths", lengths, 3, (torch.int32,), first.device)
    check_shape("lengths", lengths, (len(keys), *first.shape[:2]))
    most = max(each.shape[2] for each in keys)
    if isinstance(stored, bool) or not isinstance(stored, int | torch.SymInt):
        raise TypeError(f"stored must be an int, the most tokens stored, got {stored!r}.")
    if not 0 <= stored <= most:
        raise ValueError(
            f"stored must be between 0 and {most}, the most slots of any layer, got {stored}."
        )
    _check_by_slot("order", order, keys, torch.int32)
    if (first.dtype == torch.int8) != (key_scales is not None):
        raise ValueError(
            "key_scales must be given for int8 keys and for no others, and keys[0] is "
            f"{first.dtype} with key_scales {'given' if key_scales is not None else 'missing'}."
        )
    _check_by_slot("key_scales", key_scales, keys, torch.float32)


def _check_by_slot(
    name: str,
    tensors: Sequence[torch.Tensor] | None,
    keys: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    if tensors is None:
        return
    check_layers(name, tensors, len(keys))
    for layer, (each, key) in enumerate(zip(tensors, keys, strict=True)):
        check_tensor(f"{name}[{layer}]", each, 3, (dtype,), key.device)
        check_shape(f"{name}[{layer}]", each, tuple(key.shape[:3]))


def check_layers(name: str, tensors: Sequence[torch.Tensor], layers: int) -> None:
    """Refuse a list that has not one tensor a layer."""
    if len(tensors) != layers:
        raise ValueError(
            f"{name} must hold one tensor for each of the {layers} layers of keys, "
            f"and it holds {len(tensors)}."
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dimensions: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse what is no tensor of one of `dtypes` with `dimensions` dimensions on `device`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype not in dtypes:
        known = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {known}, and it is {tensor.dtype}.")
    if tensor.dim() != dimensions:
        raise ValueError(
            f"{name} must have {dimensions} dimensions, and its shape is {tuple(tensor.shape)}."
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like keys[0], and it is on {tensor.device}.")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor whose shape is not `shape`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have the shape {shape}, and it is {tuple(tensor.shape)}.")


def check_rows_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension is not contiguous, or empty."""
    if tensor.shape[-1] == 0:
        raise ValueError(
            f"{name} must have a head size of at least 1, and it is {tuple(tensor.shape)}."
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(
            f"{name} must have the stride 1 in its last dimension, and it is {tensor.stride(-1)}."
        )


def head_keys(
    keys: torch.Tensor,
    order: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    row: int,
    head: int,
    length: int,
) -> torch.Tensor:
    """Float32 keys `[length, D]` of one head of one layer, oldest first.

    Args:
        keys, order, key_scales: of that layer, as `check_stored_keys` says.
    """
    chosen = slice(0, length) if order is None else order[row, head, :length].long()
    found = keys[row, head, chosen].float()
    if key_scales is not None:
        found = found * key_scales[row, head, chosen].unsqueeze(-1)
    return found


def common_alignment(tensors: Sequence[torch.Tensor]) -> int:
    """The largest power of two up to 16 that divides, in elements, all addresses and strides.

    A kernel that is told of it loads rows in wide pieces, and stays right where it is 1.
    """
    alignment = 16
    for each in tensors:
        numbers = [each.data_ptr() // each.element_size()]
        numbers += [
            stride
            for stride, size in zip(each.stride()[:-1], each.shape[:-1], strict=True)
            if size > 1
        ]
        for number in numbers:
            while number % alignment:
                alignment //= 2
    return alignment

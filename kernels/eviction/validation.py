"""Refusals of the eviction's operations: one sentence that names the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_counts(**counts: int) -> None:
    """Raise unless every count is a non-negative int."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int | torch.SymInt):
            raise TypeError(f"{name} must be a whole number, got {count!r}.")
        if isinstance(count, int) and count < 0:
            raise ValueError(f"{name} must not be negative, got {count}.")


def check_plan_inputs(
    scores: torch.Tensor,
    lists: dict[str, Sequence[torch.Tensor]],
    lengths: torch.Tensor,
    keep: torch.Tensor,
) -> None:
    """Check what both plans read: `scores`, the per-layer `lists`, `lengths` and `keep`."""
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"scores must be a tensor [L, B, H, S], got {type(scores).__name__}.")
    _check("scores", scores, (torch.float32,), scores.device, 4, "[L, B, H, S]")
    layers, rows, heads, stored = scores.shape
    if not layers:
        raise ValueError(f"scores must be of at least one layer, got {list(scores.shape)}.")
    if stored and scores.stride(3) != 1:
        raise ValueError(
            f"scores must be contiguous along its last dimension, got stride {scores.stride(3)}."
        )
    for name, each in (("lengths", lengths), ("keep", keep)):
        check_per_head(name, each, (layers, rows, heads), scores.device)
    for name, tensors in lists.items():
        check_list(name, tensors)
        if len(tensors) != layers:
            raise ValueError(
                f"{name} must hold one tensor for each of the {layers} layers of scores, "
                f"got {len(tensors)}."
            )
        for layer, each in enumerate(tensors):
            label = f"{name}[{layer}]"
            _check(label, each, (torch.int32,), scores.device, 3, "[B, H, C]")
            if tuple(each.shape[:2]) != (rows, heads) or each.shape[2] < stored:
                raise ValueError(
                    f"{label} must have shape [{rows}, {heads}, C] with C at least the {stored} "
                    f"tokens of scores, got {list(each.shape)}."
                )
            if each.stride(2) != 1:
                raise ValueError(
                    f"{label} must be contiguous along its last dimension, got stride "
                    f"{each.stride(2)}."
                )
            shape = zip(each.shape, each.stride(), strict=True)
            if "order" in lists and any(length > 1 and step == 0 for length, step in shape):
                raise ValueError(f"{label} must not be expanded (a stride is 0), it is written to.")


def check_list(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise TypeError unless `tensors` is a list or tuple."""
    if not isinstance(tensors, list | tuple):
        raise TypeError(
            f"{name} must be a list of one tensor a layer, got {type(tensors).__name__}."
        )


def check_per_head(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = (torch.int32,),
) -> None:
    """Check a tensor `[L, B, H]` or `[L, B, H, N]` of exactly `shape`."""
    layout = "[L, B, H]" if len(shape) == 3 else "[L, B, H, N]"
    _check(name, tensor, dtypes, device, len(shape), layout)
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}.")


def check_rows(tensors: Sequence[torch.Tensor], shape: tuple[int, int, int]) -> None:
    """Check tensors `[B, H, C, D]` or `[B, H, C]` of all layers whose rows are to be moved.

    Args:
        tensors: one a layer.
        shape: the `L, B, H` that the plan is for.
    """
    layers, rows, heads = shape
    check_list("tensors", tensors)
    if not tensors:
        raise ValueError("tensors must hold one tensor [B, H, C, ...] a layer, and it is empty.")
    if len(tensors) != layers:
        raise ValueError(
            f"tensors must hold one tensor for each of the plan's {layers} layers, "
            f"got {len(tensors)}."
        )
    for layer, each in enumerate(tensors):
        first, label = tensors[0], f"tensors[{layer}]"
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{label} must be a tensor, got {type(each).__name__}.")
        if each.dim() not in (3, 4) or tuple(each.shape[:2]) != (rows, heads):
            raise ValueError(
                f"{label} must have shape [{rows}, {heads}, C, D] or [{rows}, {heads}, C], "
                f"got {list(each.shape)}."
            )
        if each.dtype != first.dtype or each.device != first.device:
            raise ValueError(
                f"{label} must be {first.dtype} on {first.device} like tensors[0], "
                f"got {each.dtype} on {each.device}."
            )
        if each.shape[3:] != first.shape[3:]:
            raise ValueError(
                f"{label} must have rows of shape {list(first.shape[3:])} like tensors[0], "
                f"got {list(each.shape[3:])}."
            )
        if each.dim() == 4 and each.shape[3] > 1 and each.stride(3) != 1:
            raise ValueError(
                f"{label} must be contiguous along its last dimension, got stride {each.stride(3)}."
            )
        # Rows that share memory would be overwritten while they are read.
        if any(n > 1 and step == 0 for n, step in zip(each.shape, each.stride(), strict=True)):
            raise ValueError(f"{label} must not be expanded (a stride is 0), it is moved in place.")


def check_plan_fits(tensors: Sequence[torch.Tensor], **slots: torch.Tensor) -> None:
    """Check on the CPU that the slots of a plan exist in every tensor."""
    least = min(each.shape[2] for each in tensors)
    for name, each in slots.items():
        if each.device.type == "cpu" and each.numel() and int(each.max()) >= least:
            raise ValueError(
                f"{name} has slots up to {int(each.max())}, but a tensor of tensors has only "
                f"{least}."
            )


def check_plan_values(
    stored: int,
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    window: int,
    sinks: int,
    most_evicted: int | None,
    most_kept: int | None,
) -> None:
    """Check numbers inside of tensors, where reading them costs nothing: on the CPU."""
    if lengths.device.type != "cpu" or lengths.numel() == 0:
        return
    if int(lengths.min()) < 0 or int(lengths.max()) > stored:
        raise ValueError(
            f"lengths must lie in 0 .. {stored} (the tokens of scores), got "
            f"{int(lengths.min())} .. {int(lengths.max())}."
        )
    evicting = keep < lengths
    if bool((evicting & (keep < window + sinks)).any()):
        raise ValueError(
            f"keep must be at least window + sinks = {window + sinks} where tokens are evicted, "
            f"got {int(keep[evicting].min())}."
        )
    evicted = int((lengths - keep).clamp_min(0).max())
    if most_evicted is not None and evicted > most_evicted:
        raise ValueError(
            f"most_evicted={most_evicted} is too small: a head evicts {evicted} tokens."
        )
    left = int(torch.minimum(lengths, keep).max())
    if most_kept is not None and left > most_kept:
        raise ValueError(f"most_kept={most_kept} is too small: a head keeps {left} tokens.")


def _check(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    dimensions: int,
    layout: str,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {layout}, got {type(tensor).__name__}.")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}.")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the rest, got {tensor.device}.")
    if tensor.dim() != dimensions:
        raise ValueError(f"{name} must have shape {layout}, got {list(tensor.shape)}.")

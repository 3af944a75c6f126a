"""One launch for all layers: a table of where each layer's tensor lies.

Layers are tensors of their own, which may grow, move and differ in capacity, so a kernel that
serves all of them reads base address and strides from a small table on the device. Tables are
remembered by their contents: between reallocations an eviction uploads nothing.
"""

from __future__ import annotations

import functools

import torch


def layer_table(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Where the tensors `[B, H, S, ...]` of all layers lie, for a kernel on their device.

    Args:
        tensors: one a layer, on one device, of one dtype.

    Returns:
        `[L, 4]` int64 on that device: address in bytes, and the strides of dim 0, 1 and 2 in
        elements.
    """
    rows = tuple((each.data_ptr(), *each.stride()[:3]) for each in tensors)
    return _upload(rows, tensors[0].device)


@functools.lru_cache(maxsize=64)
def _upload(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)

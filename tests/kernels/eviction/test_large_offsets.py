"""Addresses beyond 2^31 elements, in storage of which only a few pages are ever touched."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sparse_cache.kernels.eviction import fill_holes
from sparse_cache.kernels.eviction.triton import head_pointer, stride
from sparse_cache.kernels.eviction.types import HoleFilling
from sparse_cache.kernels.launch import launch
from tests.kernels.eviction.inputs import DEVICE


@triton.jit
def offset_kernel(p_table, p_result, layer, row, head, slot):
    p_head = head_pointer(p_table, layer, row, head, tl.int64, 16)
    tl.store(p_result, p_head.to(tl.int64) + slot * stride(p_table, layer, 2, 2))


@pytest.mark.parametrize(
    ("layer", "row", "head", "slot"), [(1, 0, 0, 0), (1, 3, 0, 0), (1, 0, 7, 0), (1, 3, 7, 90000)]
)
def test_offsets_are_of_64_bits(layer: int, row: int, head: int, slot: int) -> None:
    """A table with strides of a cache that no machine holds."""
    steps = (2**36 + 2, 2**32 + 4, 2**20 + 6)
    table = torch.tensor([[0, 0, 0, 0], [1 << 20, *steps]], dtype=torch.int64, device=DEVICE)
    result = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    launch(offset_kernel, (1,), result.device, table, result, layer, row, head, slot)
    expected = (1 << 20) + 8 * (row * steps[0] + head * steps[1]) + slot * steps[2]
    assert int(result) == expected


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU would allocate what is not touched")
def test_rows_far_apart_move() -> None:
    """Heads 2^32 and slots 2^30 bytes apart; the pages between them are never touched."""
    step, heads = 2**30, 2
    storage = torch.empty((3 * step + 2**32 + 64,), dtype=torch.int8)
    rows = storage.as_strided((1, heads, 4, 16), (2**33, 2**32, step, 1))
    rows[0, 1, 3] = torch.arange(16, dtype=torch.int8)
    rows[0, 1, 0] = 7
    pairs = torch.tensor([[[[-1], [3]]]], dtype=torch.int32)
    plan = HoleFilling(pairs, pairs.clamp_max(0), torch.tensor([[[0, 1]]], dtype=torch.int32), None)
    fill_holes([rows], plan, implementation="triton")
    assert rows[0, 1, 0].tolist() == list(range(16))

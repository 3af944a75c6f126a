"""R-KV's redundancy for all layers in three launches, without the matrix of similarities.

With `d_i = k_i / (|k_i| + 1e-8)`, `c_ij = <d_i, d_j>` for `i != j`, `c_ii = 0` and `last(i)` the
largest `j` with `c_ij > threshold`:

    total_j = sum_i c_ij - sum_{i: last(i) = j} c_ij,    redundancy = softmax_j(total_j / length)

1. `directions_kernel`: `f_i = 1 / (|k_i| + 1e-8)`, and parts of `sum_i d_i`.
2. `totals_kernel`: `sum_i c_ij = <d_j, sum_i d_i> - |d_j|^2`, and what each row forgives. The last
   similar key of a tile of rows is looked for from the newest keys backwards, until all its rows
   have found theirs: in most rows of language models it is a recent one.
3. `softmax_kernel`.

Dots are of the raw keys, so that 16-bit keys are multiplied as they are (exactly, in float32), and
int8 keys in float16 (exactly too); a cosine is `f_i * f_j * <k_i, k_j>`. The direction of an int8
key `s * q` is `q * s / (s * |q| + 1e-8)`: its scale goes into `f`.

Totals are added up by integer atomics in fixed point, in units of `2**-(29 - floor(log2 length))`,
so they do not depend on the order in which programs run, and cannot overflow: all partial sums are
sums of fewer than `length` cosines. Error: a total is off by at most one unit for each cosine that
is subtracted, and one for the sum. So `total / length` is off by at most `2**-(28 - floor(log2
length))`, that is 2e-6 at 640 tokens and 3e-5 at 8192 if every cosine is forgiven at one key and
rounded in one direction, beside the 4e-6 of float32 sums. The redundancy is off by as much,
relatively. A cosine within 2e-6 of the threshold may fall on the other side.

Names: `p_` pointer, `b_` block of values, `o_` offsets, `m_` mask. `M` keys of a tile of rows, `N`
keys of a tile of columns, `D` the head size, padded. A head size of more than `BLOCK` is
multiplied in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..layer_table import layer_table
from ..stored_keys import common_alignment

TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
}
# Programs that add up the directions of one head; each leaves one vector behind.
MOST_PARTS = 16
_PART = 1024

_COUNTS = [
    "stride_lengths_layer",
    "stride_lengths_row",
    "stride_lengths_head",
    "rows",
    "heads",
    "stored",
    "parts",
]


@triton.jit
def _head_length(
    p_lengths, stride_lengths_layer, stride_lengths_row, stride_lengths_head, layer, row, head
):
    return tl.load(
        p_lengths
        + layer * stride_lengths_layer
        + row * stride_lengths_row
        + head * stride_lengths_head
    )


@triton.jit
def _unit(length):
    """How often one is counted in fixed point: `2**(29 - floor(log2(length)))`."""
    exponent = (length.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return ((29 - exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _head_pointer(p_table, layer, row, head, TYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a head of a layer starts, and the stride of its third dimension."""
    # They come out of memory: only we can tell the compiler what divides them.
    p_layer = p_table + layer * 4
    p_first = tl.load(p_layer).to(tl.pointer_type(TYPE))
    p_first = tl.multiple_of(p_first, ALIGNMENT * TYPE.primitive_bitwidth // 8)
    stride_row = tl.multiple_of(tl.load(p_layer + 1), ALIGNMENT)
    stride_head = tl.multiple_of(tl.load(p_layer + 2), ALIGNMENT)
    stride_third = tl.multiple_of(tl.load(p_layer + 3), ALIGNMENT)
    return p_first + row * stride_row + head * stride_head, stride_third


@triton.jit
def _load_rows(p_row, m_row, first, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`[rows, BLOCK]`: the part of each row that starts at `first`."""
    o_d = first + tl.arange(0, BLOCK)
    return tl.load(
        p_row[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < HEAD_SIZE)[None, :], other=0
    )


@triton.jit
def _slots(p_order, stride_order, o_key, m_key, ORDERED: tl.constexpr):
    """Int64 slots of the keys with these sequence indices."""
    if ORDERED:
        o_slot = tl.load(p_order + o_key.to(tl.int64) * stride_order, mask=m_key, other=0)
    else:
        o_slot = o_key
    return o_slot.to(tl.int64)


@triton.jit(do_not_specialize=_COUNTS)
def directions_kernel(
    p_keys_table,
    p_order_table,
    p_scales_table,
    p_lengths,
    p_factors,
    p_totals,
    p_sums,
    stride_lengths_layer,
    stride_lengths_row,
    stride_lengths_head,
    rows,
    heads,
    stored,
    parts,
    KEY_TYPE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ORDERED: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    program = tl.program_id(0)
    part = tl.program_id(1)
    # Divided as int32: dividing int64 is a call, which spills registers.
    head = (program % heads).to(tl.int64)
    row = (program // heads % rows).to(tl.int64)
    layer = (program // heads // rows).to(tl.int64)
    program = program.to(tl.int64)
    length = _head_length(
        p_lengths, stride_lengths_layer, stride_lengths_row, stride_lengths_head, layer, row, head
    )
    p_keys, stride_slot = _head_pointer(p_keys_table, layer, row, head, KEY_TYPE, ALIGNMENT)
    p_order, stride_order = p_order_table, stride_slot
    if ORDERED:
        p_order, stride_order = _head_pointer(p_order_table, layer, row, head, tl.int32, 1)
    p_scales, stride_scales = p_scales_table, stride_slot
    if SCALED:
        p_scales, stride_scales = _head_pointer(p_scales_table, layer, row, head, tl.float32, 1)
    share = tl.cdiv(tl.cdiv(stored, parts), N) * N
    first = part * share
    end = tl.minimum(first + share, length)
    o_d = tl.arange(0, D)
    b_sum = tl.zeros((D,), tl.float32)
    for start in range(first, end, N):
        o_key = start + tl.arange(0, N)
        m_key = o_key < end
        o_slot = _slots(p_order, stride_order, o_key, m_key, ORDERED)
        b_keys = _load_rows(p_keys + o_slot * stride_slot, m_key, 0, HEAD_SIZE, D).to(tl.float32)
        b_norm = tl.sqrt_rn(tl.sum(b_keys * b_keys, axis=1))
        if SCALED:
            b_scale = tl.load(p_scales + o_slot * stride_scales, mask=m_key, other=0.0)
            b_factor = b_scale / (tl.abs(b_scale) * b_norm + 1e-8)
        else:
            b_factor = 1.0 / (b_norm + 1e-8)
        b_sum += tl.sum(b_keys * b_factor[:, None], axis=0)
        tl.store(p_factors + program * stored + o_key, b_factor, mask=m_key)
        tl.store(p_totals + program * stored + o_key, tl.zeros((N,), tl.int32), mask=m_key)
    tl.store(p_sums + (program * parts + part) * HEAD_SIZE + o_d, b_sum, mask=o_d < HEAD_SIZE)


@triton.jit(do_not_specialize=_COUNTS)
def totals_kernel(
    p_keys_table,
    p_order_table,
    p_lengths,
    p_factors,
    p_totals,
    p_sums,
    stride_lengths_layer,
    stride_lengths_row,
    stride_lengths_head,
    rows,
    heads,
    stored,
    parts,
    threshold,
    KEY_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ORDERED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM_BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    # Divided as int32: dividing int64 is a call, which spills registers.
    head = (program % heads).to(tl.int64)
    row = (program // heads % rows).to(tl.int64)
    layer = (program // heads // rows).to(tl.int64)
    program = program.to(tl.int64)
    length = _head_length(
        p_lengths, stride_lengths_layer, stride_lengths_row, stride_lengths_head, layer, row, head
    )
    first = tl.program_id(1) * M
    if first >= length:
        return
    unit = _unit(length)
    p_factors += program * stored
    p_totals += program * stored
    p_sums += program * parts * HEAD_SIZE

    p_keys, stride_slot = _head_pointer(p_keys_table, layer, row, head, KEY_TYPE, ALIGNMENT)
    p_order, stride_order = p_order_table, stride_slot
    if ORDERED:
        p_order, stride_order = _head_pointer(p_order_table, layer, row, head, tl.int32, 1)
    o_row = first + tl.arange(0, M)
    m_row = o_row < length
    p_row = p_keys + _slots(p_order, stride_order, o_row, m_row, ORDERED) * stride_slot
    b_row_factor = tl.load(p_factors + o_row, mask=m_row, other=0.0)

    b_total = tl.zeros((M,), tl.float32)
    for first_d in range(0, HEAD_SIZE, SUM_BLOCK):
        o_d = first_d + tl.arange(0, SUM_BLOCK)
        b_sum = tl.zeros((SUM_BLOCK,), tl.float32)
        for part in range(0, parts):
            b_sum += tl.load(p_sums + part * HEAD_SIZE + o_d, mask=o_d < HEAD_SIZE, other=0.0)
        b_some = _load_rows(p_row, m_row, first_d, HEAD_SIZE, SUM_BLOCK).to(tl.float32)
        b_some *= b_row_factor[:, None]
        b_total += tl.sum(b_some * (b_sum[None, :] - b_some), axis=1)
    tl.atomic_add(p_totals + o_row, tl.floor(b_total * unit + 0.5).to(tl.int32), mask=m_row)

    b_rows = _load_rows(p_row, m_row, 0, HEAD_SIZE, BLOCK).to(DOT_TYPE)
    b_last = tl.full((M,), -1, tl.int32)
    b_forgiven = tl.zeros((M,), tl.float32)
    start = (length - 1) // N * N
    missing = 1
    while (start >= 0) & (missing > 0):
        o_column = start + tl.arange(0, N)
        m_column = o_column < length
        p_column = p_keys + _slots(p_order, stride_order, o_column, m_column, ORDERED) * stride_slot
        b_column_factor = tl.load(p_factors + o_column, mask=m_column, other=0.0)
        b_columns = _load_rows(p_column, m_column, 0, HEAD_SIZE, BLOCK).to(DOT_TYPE)
        b_cosines = tl.dot(b_rows, tl.trans(b_columns), input_precision="ieee")
        for first_d in range(BLOCK, HEAD_SIZE, BLOCK):
            b_some = _load_rows(p_row, m_row, first_d, HEAD_SIZE, BLOCK).to(DOT_TYPE)
            b_columns = _load_rows(p_column, m_column, first_d, HEAD_SIZE, BLOCK).to(DOT_TYPE)
            b_cosines = tl.dot(b_some, tl.trans(b_columns), acc=b_cosines, input_precision="ieee")
        b_cosines = b_cosines * b_row_factor[:, None] * b_column_factor[None, :]
        b_cosines = tl.where(o_row[:, None] == o_column[None, :], 0.0, b_cosines)
        m_similar = (b_cosines > threshold) & m_column[None, :]
        b_found = tl.max(tl.where(m_similar, o_column[None, :], -1), axis=1)
        b_value = tl.sum(tl.where(o_column[None, :] == b_found[:, None], b_cosines, 0.0), axis=1)
        m_new = (b_last < 0) & (b_found >= 0)
        b_forgiven = tl.where(m_new, b_value, b_forgiven)
        b_last = tl.where(m_new, b_found, b_last)
        missing = tl.sum((m_row & (b_last < 0)).to(tl.int32), axis=0)
        start -= N
    b_minus = -tl.floor(b_forgiven * unit + 0.5).to(tl.int32)
    tl.atomic_add(p_totals + b_last, b_minus, mask=m_row & (b_last >= 0))


@triton.jit(do_not_specialize=_COUNTS)
def softmax_kernel(
    p_lengths,
    p_totals,
    p_redundancy,
    stride_lengths_layer,
    stride_lengths_row,
    stride_lengths_head,
    rows,
    heads,
    stored,
    N: tl.constexpr,
):
    program = tl.program_id(0)
    # Divided as int32: dividing int64 is a call, which spills registers.
    head = (program % heads).to(tl.int64)
    row = (program // heads % rows).to(tl.int64)
    layer = (program // heads // rows).to(tl.int64)
    program = program.to(tl.int64)
    length = _head_length(
        p_lengths, stride_lengths_layer, stride_lengths_row, stride_lengths_head, layer, row, head
    )
    unit = _unit(length)
    p_totals += program * stored
    p_redundancy += program * stored
    # A mean cosine is at most 1: its exponential needs no maximum to be subtracted.
    b_sum = tl.zeros((N,), tl.float32)
    for start in range(0, length, N):
        o_key = start + tl.arange(0, N)
        b_mean = tl.load(p_totals + o_key, mask=o_key < length, other=0).to(tl.float32)
        b_sum += tl.where(o_key < length, tl.exp(b_mean / unit / length), 0.0)
    total = tl.sum(b_sum, axis=0)
    for start in range(0, stored, N):
        o_key = start + tl.arange(0, N)
        b_mean = tl.load(p_totals + o_key, mask=o_key < length, other=0).to(tl.float32)
        b_share = tl.where(o_key < length, tl.exp(b_mean / unit / length) / total, 0.0)
        tl.store(p_redundancy + o_key, b_share, mask=o_key < stored)


def tiles(key_type: torch.dtype, head_size: int) -> dict[str, dict[str, Any]]:
    """Sizes of the tiles and the compiler's options of each kernel."""
    size = max(triton.next_power_of_2(head_size), 64)
    wide = key_type == torch.float32
    return {
        "directions": {"N": max(8192 // size, 1), "D": size, "num_warps": 4, "num_stages": 2},
        "totals": {
            "M": 32 if wide else 64,
            "N": 32 if wide else 64,
            # Dots in float32 are unrolled, number by number.
            "BLOCK": 32 if wide else size if size <= 128 else 64,
            "SUM_BLOCK": min(size, 64),
            # Rows that are padded take more registers.
            "num_warps": 8 if wide or size > 128 or size != head_size else 4,
            "num_stages": 2,
        },
        "softmax": {"N": 1024, "num_warps": 4, "num_stages": 1},
    }


def redundancy(
    keys: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    stored: int,
    similarity_threshold: float,
    key_scales: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """As `kernels.redundancy.redundancy`, whose arguments these are.

    Beside what it returns, it holds one int32 buffer of the same size, and at most 16 float32
    vectors a head.
    """
    layers, rows, heads = lengths.shape
    all_heads = layers * rows * heads
    # Factors of the directions until the last kernel writes the redundancy over them.
    factors = torch.empty((*lengths.shape, stored), dtype=torch.float32, device=lengths.device)
    if not factors.numel():
        return factors
    totals = torch.empty_like(factors, dtype=torch.int32)
    head_size = keys[0].shape[3]
    parts = min(triton.cdiv(stored, _PART), MOST_PARTS)
    sums = factors.new_empty((all_heads, parts, head_size))
    keys_table = layer_table(list(keys))
    order_table = keys_table if order is None else layer_table(list(order))
    scales_table = keys_table if key_scales is None else layer_table(list(key_scales))
    key_type = keys[0].dtype
    sizes = tiles(key_type, head_size)
    shared = {
        "KEY_TYPE": TYPES[key_type],
        "HEAD_SIZE": head_size,
        "ORDERED": order is not None,
        "ALIGNMENT": common_alignment(keys),
    }
    counts = (*lengths.stride(), rows, heads, stored)
    launch(
        directions_kernel,
        (all_heads, parts),
        lengths.device,
        keys_table,
        order_table,
        scales_table,
        lengths,
        factors,
        totals,
        sums,
        *counts,
        parts,
        SCALED=key_scales is not None,
        **shared,
        **sizes["directions"],
    )
    launch(
        totals_kernel,
        (all_heads, triton.cdiv(stored, sizes["totals"]["M"])),
        lengths.device,
        keys_table,
        order_table,
        lengths,
        factors,
        totals,
        sums,
        *counts,
        parts,
        similarity_threshold,
        DOT_TYPE=tl.float16 if key_type == torch.int8 else TYPES[key_type],
        **shared,
        **sizes["totals"],
    )
    launch(
        softmax_kernel,
        (all_heads,),
        lengths.device,
        lengths,
        totals,
        factors,
        *counts,
        **sizes["softmax"],
    )
    return factors

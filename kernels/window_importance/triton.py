"""Window importance for all layers in one launch.

One program a head. With `s[g, w, i] = scaling * <query of head g and token w, key i>`:

- older: `s[w, i] = mean_g or max_g s[g, w, i]`, `p = softmax_i s` over `i < length - window`,
  importance `= mean_w p`;
- causal: `p = softmax_i s` over `i <= length - W + w`, importance `= mean_g or max_g mean_w p`.

A first pass over the keys finds the maximum and the sum of each softmax, a second one computes the
logits again and adds up: they are never stored. The queries of a group are multiplied one by one
and their LOGITS averaged. Averaged queries would have to be rounded to the keys' 16 bits first.
Products of 16-bit numbers are exact in float32, so the only errors are those of float32 sums.

Error: at most `2e-6 * (1 + max |s|)` relative to float64 on the same inputs. It stems from the
rounding of the logits, of which the exponential makes a relative error. In the interpreter it was
below 1e-6 wherever it was measured with logits of up to about 10.

Queries are taken in chunks of so many tokens that a chunk of all heads of a group fits a tile. With
more than one chunk, the first pass leaves maxima and sums in a small buffer.

Names: `p_` pointer, `b_` block of values, `o_` offsets, `m_` mask. `G` query heads of a group,
`M` rows of a tile (a chunk of queries of all its heads), `R` softmaxes of a tile (`M`, or with
"older" one for each token of the chunk), `N` keys of a tile. A head size of more
than `BLOCK` is multiplied in pieces.
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
    return p_first + row * stride_row + head * stride_head, stride_head, stride_third


@triton.jit
def _load_rows(p_row, m_row, first, HEAD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`[rows, BLOCK]`: the part of each row that starts at `first`."""
    o_d = first + tl.arange(0, BLOCK)
    return tl.load(
        p_row[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < HEAD_SIZE)[None, :], other=0
    )


@triton.jit
def _query_rows(
    p_queries,
    stride_head,
    stride_token,
    chunk,
    queries,
    length,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Where each query of a chunk lies, whether it is one of a stored token, and which; `[M]`."""
    o_row = tl.arange(0, G * CHUNK)
    o_head = o_row // CHUNK
    o_token = chunk * CHUNK + o_row % CHUNK
    m_row = (o_head < GROUP) & (o_token < queries) & (o_token >= queries - length)
    p_row = p_queries + o_head.to(tl.int64) * stride_head + o_token.to(tl.int64) * stride_token
    return p_row, m_row, o_token


@triton.jit
def _key_rows(
    p_keys,
    stride_slot,
    p_order,
    stride_order,
    p_scales,
    stride_scales,
    o_key,
    m_key,
    ORDERED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Where each key of a tile lies, and the factor of its logits; `[N]`."""
    if ORDERED:
        o_slot = tl.load(p_order + o_key.to(tl.int64) * stride_order, mask=m_key, other=0)
    else:
        o_slot = o_key
    o_slot = o_slot.to(tl.int64)
    if SCALED:
        b_scales = tl.load(p_scales + o_slot * stride_scales, mask=m_key, other=0.0)
    else:
        b_scales = tl.full(o_key.shape, 1.0, tl.float32)
    return p_keys + o_slot * stride_slot, b_scales


@triton.jit
def _logits(
    b_queries,
    p_query_row,
    m_query,
    o_token,
    b_keys,
    p_key_row,
    b_scales,
    o_key,
    m_key,
    scaling,
    queries,
    length,
    QUERY_TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OLDER: tl.constexpr,
    MAX: tl.constexpr,
    SCALED: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is softmaxed, `[R, N]`, minus infinity where a key is not to be seen.

    `b_queries` and `b_keys` are the first blocks of their rows; further ones are loaded here.
    """
    b_logits = tl.dot(b_queries, tl.trans(b_keys.to(QUERY_TYPE)), input_precision="ieee")
    for first in range(BLOCK, HEAD_SIZE, BLOCK):
        b_some_queries = _load_rows(p_query_row, m_query, first, HEAD_SIZE, BLOCK)
        b_some_keys = _load_rows(p_key_row, m_key, first, HEAD_SIZE, BLOCK).to(QUERY_TYPE)
        b_logits = tl.dot(
            b_some_queries, tl.trans(b_some_keys), acc=b_logits, input_precision="ieee"
        )
    b_logits *= scaling
    if SCALED:
        b_logits *= b_scales[None, :]
    if OLDER:
        b_heads = tl.reshape(b_logits, (G, CHUNK, N))
        m_head = (tl.arange(0, G) < GROUP)[:, None, None]
        if MAX:
            b_logits = tl.max(tl.where(m_head, b_heads, float("-inf")), axis=0)
        else:
            # Rows of heads that do not exist are zeros.
            b_logits = tl.sum(b_heads, axis=0) / GROUP
        m_seen = m_key[None, :]
    else:
        # A token that is not stored sees key 0, so that its softmax is a number.
        o_newest = tl.maximum(length - queries + o_token, 0)
        m_seen = m_key[None, :] & (o_key[None, :] <= o_newest[:, None])
    return tl.where(m_seen, b_logits, float("-inf"))


@triton.jit(
    do_not_specialize=[
        "stride_lengths_layer",
        "stride_lengths_row",
        "stride_lengths_head",
        "rows",
        "heads",
        "queries",
        "window",
        "stored",
    ]
)
def window_importance_kernel(
    p_queries_table,
    p_keys_table,
    p_order_table,
    p_scales_table,
    p_lengths,
    p_importance,
    p_statistics,
    stride_lengths_layer,
    stride_lengths_row,
    stride_lengths_head,
    rows,
    heads,
    queries,
    window,
    stored,
    scaling,
    QUERY_TYPE: tl.constexpr,
    KEY_TYPE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    OLDER: tl.constexpr,
    MAX: tl.constexpr,
    ORDERED: tl.constexpr,
    SCALED: tl.constexpr,
    KEY_ALIGNMENT: tl.constexpr,
    QUERY_ALIGNMENT: tl.constexpr,
    CHUNKS: tl.constexpr,
    G: tl.constexpr,
    CHUNK: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    # Divided as int32: dividing int64 is a call, which spills registers.
    head = (program % heads).to(tl.int64)
    row = (program // heads % rows).to(tl.int64)
    layer = (program // heads // rows).to(tl.int64)
    program = program.to(tl.int64)
    length = tl.load(
        p_lengths
        + layer * stride_lengths_layer
        + row * stride_lengths_row
        + head * stride_lengths_head
    )

    p_queries, stride_head, stride_token = _head_pointer(
        p_queries_table, layer, row, head * GROUP, QUERY_TYPE, QUERY_ALIGNMENT
    )
    p_keys, _, stride_slot = _head_pointer(p_keys_table, layer, row, head, KEY_TYPE, KEY_ALIGNMENT)
    p_order, stride_order = p_order_table, stride_slot
    if ORDERED:
        p_order, _, stride_order = _head_pointer(p_order_table, layer, row, head, tl.int32, 1)
    p_scales, stride_scales = p_scales_table, stride_slot
    if SCALED:
        p_scales, _, stride_scales = _head_pointer(p_scales_table, layer, row, head, tl.float32, 1)

    p_importance += program * stored
    p_statistics += program * (CHUNKS * 2 * R)
    o_n = tl.arange(0, N)
    o_r = tl.arange(0, R)

    seen = length
    if OLDER:
        seen = tl.maximum(length - window, 0)

    p_query_row, m_query, o_token = _query_rows(
        p_queries, stride_head, stride_token, 0, queries, length, GROUP, G, CHUNK
    )
    b_queries = _load_rows(p_query_row, m_query, 0, HEAD_SIZE, BLOCK)
    b_max = tl.full((R,), float("-inf"), tl.float32)
    b_sum = tl.zeros((R,), tl.float32)
    for chunk in range(CHUNKS):
        if CHUNKS > 1:
            p_query_row, m_query, o_token = _query_rows(
                p_queries, stride_head, stride_token, chunk, queries, length, GROUP, G, CHUNK
            )
            b_queries = _load_rows(p_query_row, m_query, 0, HEAD_SIZE, BLOCK)
            b_max = tl.full((R,), float("-inf"), tl.float32)
            b_sum = tl.zeros((R,), tl.float32)
        for start in range(0, seen, N):
            o_key = start + o_n
            m_key = o_key < seen
            p_key_row, b_scales = _key_rows(
                p_keys,
                stride_slot,
                p_order,
                stride_order,
                p_scales,
                stride_scales,
                o_key,
                m_key,
                ORDERED,
                SCALED,
            )
            b_keys = _load_rows(p_key_row, m_key, 0, HEAD_SIZE, BLOCK)
            b_logits = _logits(
                b_queries,
                p_query_row,
                m_query,
                o_token,
                b_keys,
                p_key_row,
                b_scales,
                o_key,
                m_key,
                scaling,
                queries,
                length,
                QUERY_TYPE,
                GROUP,
                HEAD_SIZE,
                OLDER,
                MAX,
                SCALED,
                G,
                CHUNK,
                N,
                BLOCK,
            )
            b_larger = tl.maximum(b_max, tl.max(b_logits, axis=1))
            b_sum *= tl.exp(b_max - b_larger)
            b_sum += tl.sum(tl.exp(b_logits - b_larger[:, None]), axis=1)
            b_max = b_larger
        if CHUNKS > 1:
            p_chunk = p_statistics + chunk * (2 * R)
            tl.store(p_chunk + o_r, b_max)
            tl.store(p_chunk + R + o_r, b_sum)
    if CHUNKS > 1:
        # Other threads of this program load what was stored here.
        tl.debug_barrier()

    for start in range(0, seen, N):
        o_key = start + o_n
        m_key = o_key < seen
        p_key_row, b_scales = _key_rows(
            p_keys,
            stride_slot,
            p_order,
            stride_order,
            p_scales,
            stride_scales,
            o_key,
            m_key,
            ORDERED,
            SCALED,
        )
        b_keys = _load_rows(p_key_row, m_key, 0, HEAD_SIZE, BLOCK)
        # By head of the group where they are reduced last.
        b_added = tl.zeros((1 if OLDER else G, N), tl.float32)
        for chunk in range(CHUNKS):
            if CHUNKS > 1:
                p_query_row, m_query, o_token = _query_rows(
                    p_queries, stride_head, stride_token, chunk, queries, length, GROUP, G, CHUNK
                )
                b_queries = _load_rows(p_query_row, m_query, 0, HEAD_SIZE, BLOCK)
                p_chunk = p_statistics + chunk * (2 * R)
                b_max = tl.load(p_chunk + o_r)
                b_sum = tl.load(p_chunk + R + o_r)
            b_logits = _logits(
                b_queries,
                p_query_row,
                m_query,
                o_token,
                b_keys,
                p_key_row,
                b_scales,
                o_key,
                m_key,
                scaling,
                queries,
                length,
                QUERY_TYPE,
                GROUP,
                HEAD_SIZE,
                OLDER,
                MAX,
                SCALED,
                G,
                CHUNK,
                N,
                BLOCK,
            )
            b_shares = tl.exp(b_logits - b_max[:, None]) / b_sum[:, None]
            o_softmax = chunk * CHUNK + o_r % CHUNK
            m_softmax = (o_softmax < queries) & (o_softmax >= queries - length)
            if not OLDER:
                m_softmax = m_softmax & (o_r // CHUNK < GROUP)
            b_shares = tl.where(m_softmax[:, None], b_shares, 0.0)
            b_added += tl.sum(tl.reshape(b_shares, (R // CHUNK, CHUNK, N)), axis=1)
        b_added /= tl.minimum(queries, length)
        if OLDER:
            b_reduced = tl.sum(b_added, axis=0)
        elif MAX:
            b_reduced = tl.max(b_added, axis=0)
        else:
            b_reduced = tl.sum(b_added, axis=0) / GROUP
        tl.store(p_importance + o_key, b_reduced, mask=m_key)

    for start in range(seen, stored, N):
        o_key = start + o_n
        tl.store(p_importance + o_key, tl.zeros((N,), tl.float32), mask=o_key < stored)


def tiles(
    query_type: torch.dtype, group: int, queries: int, head_size: int, older: bool
) -> dict[str, Any]:
    """Sizes of the tiles and the compiler's options for one shape.

    Args:
        group: query heads that share a key.
        queries: tokens whose queries are given.
    """
    wide = query_type == torch.float32
    padded_group = triton.next_power_of_2(group)
    # A dot has at least 16 rows, and in float32 more than 32 no longer fit the registers.
    largest = 32 if wide else 64
    chunk = min(triton.next_power_of_2(queries), max(largest // padded_group, 1))
    chunk = max(chunk, 16 // padded_group, 1)
    padded_size = max(triton.next_power_of_2(head_size), 16)
    chunks = triton.cdiv(queries, chunk)
    return {
        "CHUNKS": chunks,
        "G": padded_group,
        "CHUNK": chunk,
        "R": chunk if older else padded_group * chunk,
        "N": 32 if (padded_size > 128 and not wide) or chunks > 1 else 64,
        # Dots in float32 are unrolled, number by number.
        "BLOCK": min(padded_size, 32 if wide else 128),
        # One query fills its tile with rows that do not count, but take registers.
        "num_warps": 8 if wide or chunks > 1 or queries == 1 else 4,
        # Loads must not move above the barrier behind the first pass.
        "num_stages": 1 if chunks > 1 or wide else 2,
    }


def window_importance(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    stored: int,
    window: int,
    scaling: float,
    normalization: str,
    group_reduction: str,
    key_scales: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """As `kernels.window_importance.window_importance`, whose arguments these are."""
    layers, rows, heads = lengths.shape
    importance = torch.empty((*lengths.shape, stored), dtype=torch.float32, device=lengths.device)
    if not importance.numel():
        return importance
    group, count, head_size = queries[0].shape[1] // heads, *queries[0].shape[2:]
    older = normalization == "older"
    sizes = tiles(queries[0].dtype, group, count, head_size, older)
    statistics = importance
    if sizes["CHUNKS"] > 1:
        statistics = importance.new_empty(lengths.numel() * sizes["CHUNKS"] * 2 * sizes["R"])
    keys_table = layer_table(list(keys))
    launch(
        window_importance_kernel,
        (layers * rows * heads,),
        lengths.device,
        layer_table(list(queries)),
        keys_table,
        keys_table if order is None else layer_table(list(order)),
        keys_table if key_scales is None else layer_table(list(key_scales)),
        lengths,
        importance,
        statistics,
        *lengths.stride(),
        rows,
        heads,
        count,
        window,
        stored,
        scaling,
        QUERY_TYPE=TYPES[queries[0].dtype],
        KEY_TYPE=TYPES[keys[0].dtype],
        GROUP=group,
        HEAD_SIZE=head_size,
        OLDER=older,
        MAX=group_reduction == "max",
        ORDERED=order is not None,
        SCALED=key_scales is not None,
        KEY_ALIGNMENT=common_alignment(keys),
        QUERY_ALIGNMENT=common_alignment(queries),
        **sizes,
    )
    return importance

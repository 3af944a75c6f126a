"""Attention with the living keys loaded through an index, so that no logits travel through memory.

With `x = scaling q k`, softcapped if asked, over the keys that a query sees, `z` the sink:

    L  = log(exp(z) + sum exp(x)),  P = exp(x - L),  O = P V
    dV = P^T dO,  dS = P (dO V^T - rowsum(dO O)) x',  dQ = scaling dS K,  dK = scaling dS^T Q

Output and dQ: a program has a block of queries of one query head, which are neighbours, and walks
through the keys that are alive at the block's start, then through the block's own columns. dK and
dV: a key is seen by the queries from its own column to its death, which are neighbours; a program
has a tile of keys that die at about the same time and walks through their queries, for all query
heads of the group. So every result is written by one program, in one order, without atomics.

A product takes float16 or bfloat16 as they are, or float32 in full precision; sums are float32.

Names: `p_` pointer, `b_` block of values, `o_` offsets in elements, `m_` mask. A block's shape is
in M (queries), N (keys), D and Dv (head sizes, padded to a power of two).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from .periods import LONGEST
from .tiles import key_tiles, query_blocks

_LOG2E = tl.constexpr(1.4426950408889634)


class Configuration(NamedTuple):
    """How a kernel is cut."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


def configuration(
    size: int, value_size: int, dtype: torch.dtype, *, backward: bool
) -> Configuration:
    """Blocks that fit into registers, by what the compiler reports; nobody has timed them."""
    largest = max(size, value_size)
    if dtype not in (torch.float16, torch.bfloat16):
        # Products in full precision take no tensor cores, and many registers.
        small = backward and largest > 64
        return Configuration(16, 32, 4, 1) if small else Configuration(32, 32, 8, 1)
    if largest > 128:
        return Configuration(32, 32, 8, 1)
    if backward:
        return Configuration(64, 32, 8, 1)
    return Configuration(64, 64, 4 if largest <= 64 else 8, 1)


@triton.jit
def _logits(b_query, b_key, scaling, softcap, SOFTCAP: tl.constexpr):
    """`[M, N]` logits, and their derivative by what the softcap is applied to."""
    b_logits = tl.dot(b_query, tl.trans(b_key), input_precision="ieee") * scaling
    b_slope = tl.full(b_logits.shape, 1.0, tl.float32)
    if SOFTCAP:
        # tanh by the exponential of a negative number, which cannot overflow.
        b_small = tl.exp2(tl.abs(b_logits) / softcap * (-2.0 * _LOG2E))
        b_tanh = (1.0 - b_small) / (1.0 + b_small)
        b_tanh = tl.where(b_logits < 0, -b_tanh, b_tanh)
        b_slope = 1.0 - b_tanh * b_tanh
        b_logits = softcap * b_tanh
    return b_logits, b_slope


@triton.jit
def _key_columns(p_columns, p_deaths, begin, count, total, first, start, KEYS: tl.constexpr):
    """Columns and deaths of keys `begin ..` of a block: `[N]` each; death 0 beyond the end."""
    o_key = begin + tl.arange(0, KEYS)
    m_key = o_key < total
    m_older = o_key < count
    listed = tl.where(first < 0, count, 0)
    b_listed = tl.load(p_columns + o_key, mask=o_key < listed, other=0)
    b_column = tl.where(first < 0, b_listed, first + o_key)
    b_column = tl.where(m_older, b_column, start + o_key - count)
    b_death = tl.load(p_deaths + b_column, mask=m_key, other=0)
    return b_column, b_death


@triton.jit
def _rows(p_tensor, b_column, m_column, stride, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr):
    """`[N, D]`: the rows of a `[T, D]` tensor at these columns, 0 where masked."""
    o_size = tl.arange(0, SIZE_BLOCK)
    return tl.load(
        p_tensor + b_column.to(tl.int64)[:, None] * stride + o_size[None, :],
        mask=m_column[:, None] & (o_size < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def attend(
    p_query,
    p_key,
    p_value,
    p_deaths,
    p_sinks,
    p_blocks,
    p_starts,
    p_counts,
    p_columns,
    p_output,
    p_log_sum_exp,
    scaling,
    softcap,
    length,
    query_heads,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    deaths_heads,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Output and log-sum-exp of a part of a block, for one query head."""
    block = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(1)
    kv_head = head // GROUP
    row = tl.load(p_blocks + block * 4).to(tl.int64)
    start = tl.load(p_blocks + block * 4 + 1)
    stop = tl.load(p_blocks + block * 4 + 2)
    first = tl.load(p_blocks + block * 4 + 3)
    deaths_head = tl.where(deaths_heads > 1, kv_head, 0)
    o_list = block.to(tl.int64) * deaths_heads + deaths_head
    count = tl.load(p_counts + o_list)
    p_columns += tl.load(p_starts + o_list)
    p_deaths += (row * deaths_heads + deaths_head) * length
    p_query += row * query_row + head.to(tl.int64) * query_head
    p_key += row * key_row + kv_head.to(tl.int64) * key_head
    p_value += row * value_row + kv_head.to(tl.int64) * value_head

    o_query = start + part * QUERIES + tl.arange(0, QUERIES)
    m_query = o_query < stop
    m_real = tl.load(p_deaths + o_query, mask=m_query, other=0) > 0
    b_query = _rows(p_query, o_query, m_real, query_token, SIZE, SIZE_BLOCK)
    b_max = tl.full([QUERIES], float("-inf"), tl.float32)
    b_sum = tl.zeros([QUERIES], tl.float32)
    if p_sinks is not None:
        b_max = tl.zeros([QUERIES], tl.float32) + tl.load(p_sinks + head).to(tl.float32)
        b_sum += 1.0
    b_output = tl.zeros([QUERIES, VALUE_BLOCK], tl.float32)
    # Own columns behind this part are nobody's keys.
    total = count + tl.minimum(stop - start, (part + 1) * QUERIES)
    if part * QUERIES >= stop - start:
        total = 0
    for begin in tl.range(0, total, KEYS):
        b_column, b_death = _key_columns(
            p_columns, p_deaths, begin, count, total, first, start, KEYS
        )
        b_key = _rows(p_key, b_column, b_death > 0, key_token, SIZE, SIZE_BLOCK)
        b_logits, _ = _logits(b_query, b_key, scaling, softcap, SOFTCAP)
        m_seen = (b_column[None, :] <= o_query[:, None]) & (o_query[:, None] < b_death[None, :])
        b_logits = tl.where(m_seen & m_real[:, None], b_logits, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_logits, axis=1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2((b_logits - b_base[:, None]) * _LOG2E)
        b_shrink = tl.exp2((b_max - b_base) * _LOG2E)
        b_value = _rows(p_value, b_column, b_death > 0, value_token, VALUE_SIZE, VALUE_BLOCK)
        b_output = b_output * b_shrink[:, None]
        b_output = tl.dot(b_weight.to(b_value.dtype), b_value, acc=b_output, input_precision="ieee")
        b_sum = b_sum * b_shrink + tl.sum(b_weight, axis=1)
        b_max = b_new
    m_some = b_sum > 0
    b_output = b_output / tl.where(m_some, b_sum, 1.0)[:, None]
    b_log = tl.where(m_some, b_max + tl.log(tl.where(m_some, b_sum, 1.0)), float("inf"))
    o_value = tl.arange(0, VALUE_BLOCK)
    o_out = (row * query_heads + head) * length + o_query
    tl.store(
        p_output + o_out[:, None] * VALUE_SIZE + o_value[None, :],
        b_output.to(p_output.dtype.element_ty),
        mask=m_query[:, None] & (o_value < VALUE_SIZE)[None, :],
    )
    tl.store(p_log_sum_exp + o_out, b_log, mask=m_query)


@triton.jit
def differentiate_queries(
    p_grad,
    p_query,
    p_key,
    p_value,
    p_deaths,
    p_blocks,
    p_starts,
    p_counts,
    p_columns,
    p_log_sum_exp,
    p_delta,
    p_grad_query,
    scaling,
    softcap,
    length,
    query_heads,
    grad_row,
    grad_head,
    grad_token,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    deaths_heads,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """dQ of a part of a block, for one query head."""
    block = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(1)
    kv_head = head // GROUP
    row = tl.load(p_blocks + block * 4).to(tl.int64)
    start = tl.load(p_blocks + block * 4 + 1)
    stop = tl.load(p_blocks + block * 4 + 2)
    first = tl.load(p_blocks + block * 4 + 3)
    deaths_head = tl.where(deaths_heads > 1, kv_head, 0)
    o_list = block.to(tl.int64) * deaths_heads + deaths_head
    count = tl.load(p_counts + o_list)
    p_columns += tl.load(p_starts + o_list)
    p_deaths += (row * deaths_heads + deaths_head) * length
    p_grad += row * grad_row + head.to(tl.int64) * grad_head
    p_query += row * query_row + head.to(tl.int64) * query_head
    p_key += row * key_row + kv_head.to(tl.int64) * key_head
    p_value += row * value_row + kv_head.to(tl.int64) * value_head

    o_query = start + part * QUERIES + tl.arange(0, QUERIES)
    m_query = o_query < stop
    m_real = tl.load(p_deaths + o_query, mask=m_query, other=0) > 0
    o_out = (row * query_heads + head) * length + o_query
    b_log = tl.load(p_log_sum_exp + o_out, mask=m_query, other=float("inf"))
    b_delta = tl.load(p_delta + o_out, mask=m_query, other=0.0)
    b_query = _rows(p_query, o_query, m_real, query_token, SIZE, SIZE_BLOCK)
    b_grad = _rows(p_grad, o_query, m_real, grad_token, VALUE_SIZE, VALUE_BLOCK)
    b_grad_query = tl.zeros([QUERIES, SIZE_BLOCK], tl.float32)
    total = count + tl.minimum(stop - start, (part + 1) * QUERIES)
    if part * QUERIES >= stop - start:
        total = 0
    for begin in tl.range(0, total, KEYS):
        b_column, b_death = _key_columns(
            p_columns, p_deaths, begin, count, total, first, start, KEYS
        )
        b_key = _rows(p_key, b_column, b_death > 0, key_token, SIZE, SIZE_BLOCK)
        b_value = _rows(p_value, b_column, b_death > 0, value_token, VALUE_SIZE, VALUE_BLOCK)
        b_logits, b_slope = _logits(b_query, b_key, scaling, softcap, SOFTCAP)
        m_seen = (b_column[None, :] <= o_query[:, None]) & (o_query[:, None] < b_death[None, :])
        m_seen = m_seen & m_real[:, None]
        b_weight = tl.exp2((b_logits - b_log[:, None]) * _LOG2E)
        b_inner = tl.dot(b_grad, tl.trans(b_value), input_precision="ieee") - b_delta[:, None]
        b_inner = tl.where(m_seen, b_weight * b_inner * b_slope, 0.0)
        b_grad_query = tl.dot(
            b_inner.to(b_key.dtype), b_key, acc=b_grad_query, input_precision="ieee"
        )
    o_size = tl.arange(0, SIZE_BLOCK)
    tl.store(
        p_grad_query + o_out[:, None] * SIZE + o_size[None, :],
        (b_grad_query * scaling).to(p_grad_query.dtype.element_ty),
        mask=m_query[:, None] & (o_size < SIZE)[None, :],
    )


@triton.jit
def differentiate_keys(
    p_grad,
    p_query,
    p_key,
    p_value,
    p_deaths,
    p_columns,
    p_spans,
    p_log_sum_exp,
    p_delta,
    p_grad_key,
    p_grad_value,
    scaling,
    softcap,
    length,
    heads,
    tiles,
    grad_row,
    grad_head,
    grad_token,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    deaths_heads,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """dK and dV of a tile of keys of one KV head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    deaths_head = tl.where(deaths_heads > 1, kv_head, 0)
    o_tile = (row * deaths_heads + deaths_head) * tiles + tile
    o_key = tl.arange(0, KEYS)
    b_column = tl.load(p_columns + o_tile * KEYS + o_key)
    m_key = b_column < length
    p_deaths += (row * deaths_heads + deaths_head) * length
    b_death = tl.load(p_deaths + b_column, mask=m_key, other=0)
    begin = tl.load(p_spans + o_tile * 2)
    end = tl.load(p_spans + o_tile * 2 + 1)
    p_key += row * key_row + kv_head.to(tl.int64) * key_head
    p_value += row * value_row + kv_head.to(tl.int64) * value_head
    b_key = _rows(p_key, b_column, b_death > 0, key_token, SIZE, SIZE_BLOCK)
    b_value = _rows(p_value, b_column, b_death > 0, value_token, VALUE_SIZE, VALUE_BLOCK)
    b_grad_key = tl.zeros([KEYS, SIZE_BLOCK], tl.float32)
    b_grad_value = tl.zeros([KEYS, VALUE_BLOCK], tl.float32)
    for member in tl.range(0, GROUP):
        head = kv_head.to(tl.int64) * GROUP + member
        p_own_query = p_query + row * query_row + head * query_head
        p_own_grad = p_grad + row * grad_row + head * grad_head
        o_head = (row * heads * GROUP + head) * length
        for from_query in tl.range(begin, end, QUERIES):
            o_query = from_query + tl.arange(0, QUERIES)
            m_query = o_query < end
            m_real = tl.load(p_deaths + o_query, mask=m_query, other=0) > 0
            b_log = tl.load(p_log_sum_exp + o_head + o_query, mask=m_query, other=float("inf"))
            b_delta = tl.load(p_delta + o_head + o_query, mask=m_query, other=0.0)
            b_query = _rows(p_own_query, o_query, m_real, query_token, SIZE, SIZE_BLOCK)
            b_grad = _rows(p_own_grad, o_query, m_real, grad_token, VALUE_SIZE, VALUE_BLOCK)
            b_logits, b_slope = _logits(b_query, b_key, scaling, softcap, SOFTCAP)
            m_seen = (b_column[None, :] <= o_query[:, None]) & (o_query[:, None] < b_death[None, :])
            m_seen = m_seen & m_real[:, None]
            b_weight = tl.where(m_seen, tl.exp2((b_logits - b_log[:, None]) * _LOG2E), 0.0)
            b_inner = tl.dot(b_grad, tl.trans(b_value), input_precision="ieee") - b_delta[:, None]
            b_inner = b_weight * b_inner * b_slope
            b_grad_value = tl.dot(
                tl.trans(b_weight.to(b_grad.dtype)),
                b_grad,
                acc=b_grad_value,
                input_precision="ieee",
            )
            b_grad_key = tl.dot(
                tl.trans(b_inner.to(b_query.dtype)),
                b_query,
                acc=b_grad_key,
                input_precision="ieee",
            )
    o_size, o_value = tl.arange(0, SIZE_BLOCK), tl.arange(0, VALUE_BLOCK)
    o_out = (row * heads + kv_head) * length + b_column
    tl.store(
        p_grad_key + o_out[:, None] * SIZE + o_size[None, :],
        (b_grad_key * scaling).to(p_grad_key.dtype.element_ty),
        mask=m_key[:, None] & (o_size < SIZE)[None, :],
    )
    tl.store(
        p_grad_value + o_out[:, None] * VALUE_SIZE + o_value[None, :],
        b_grad_value.to(p_grad_value.dtype.element_ty),
        mask=m_key[:, None] & (o_value < VALUE_SIZE)[None, :],
    )


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """With neighbouring coordinates side by side, as loads want them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    size, value_size = query.shape[3], value.shape[3]
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "SIZE": size,
        "SIZE_BLOCK": max(16, triton.next_power_of_2(size)),
        "VALUE_SIZE": value_size,
        "VALUE_BLOCK": max(16, triton.next_power_of_2(value_size)),
    }


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[B, Hq, T, Dv]`, and log-sum-exp `[B, Hq, T]` float32 (inf where nothing is seen)."""
    batch, query_heads, length = query.shape[:3]
    query, key, value = _readable(query), _readable(key), _readable(value)
    deaths = deaths.contiguous()
    output = query.new_zeros(batch, query_heads, length, value.shape[3])
    log_sum_exp = query.new_full((batch, query_heads, length), float("inf"), dtype=torch.float32)
    plan = query_blocks(deaths)
    chosen = configuration(query.shape[3], value.shape[3], query.dtype, backward=False)
    parts = triton.cdiv(LONGEST, chosen.queries)
    launch(
        attend,
        (len(plan.blocks) * parts, query_heads),
        query.device,
        query,
        key,
        value,
        deaths,
        sinks,
        plan.blocks,
        plan.starts,
        plan.counts,
        plan.columns,
        output,
        log_sum_exp,
        scaling,
        softcap or 1.0,
        length,
        query_heads,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        deaths.shape[1],
        **_sizes(query, key, value),
        QUERIES=chosen.queries,
        KEYS=chosen.keys,
        PARTS=parts,
        SOFTCAP=softcap is not None,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return output, log_sum_exp


def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deaths: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of query, key, value and sinks, in their dtypes."""
    batch, query_heads, length = query.shape[:3]
    heads = key.shape[1]
    tensors = [_readable(tensor) for tensor in (grad_output, query, key, value)]
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    deaths = deaths.contiguous()
    delta = (grad_output.float() * output.float()).sum(-1)
    grad_query = query.new_zeros(query.shape)
    grad_key, grad_value = key.new_empty(key.shape), value.new_empty(value.shape)
    sizes = _sizes(query, key, value)
    chosen = configuration(query.shape[3], value.shape[3], query.dtype, backward=True)
    common = {
        **sizes,
        "QUERIES": chosen.queries,
        "KEYS": chosen.keys,
        "SOFTCAP": softcap is not None,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
    }
    plan = query_blocks(deaths)
    parts = triton.cdiv(LONGEST, chosen.queries)
    launch(
        differentiate_queries,
        (len(plan.blocks) * parts, query_heads),
        query.device,
        *tensors,
        deaths,
        plan.blocks,
        plan.starts,
        plan.counts,
        plan.columns,
        log_sum_exp,
        delta,
        grad_query,
        scaling,
        softcap or 1.0,
        length,
        query_heads,
        *strides,
        deaths.shape[1],
        PARTS=parts,
        **common,
    )
    tiles = key_tiles(deaths, chosen.keys)
    launch(
        differentiate_keys,
        (tiles.spans.shape[2], heads, batch),
        query.device,
        *tensors,
        deaths,
        tiles.columns,
        tiles.spans,
        log_sum_exp,
        delta,
        grad_key,
        grad_value,
        scaling,
        softcap or 1.0,
        length,
        heads,
        tiles.spans.shape[2],
        *strides,
        deaths.shape[1],
        **common,
    )
    grad_sinks = None
    if sinks is not None:
        share = (sinks.float()[None, :, None] - log_sum_exp).exp()
        grad_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    return grad_query, grad_key, grad_value, grad_sinks

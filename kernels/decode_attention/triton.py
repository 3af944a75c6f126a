"""Flash-decoding: many programs share the keys of a head, a second kernel joins their results.

With logits `x_i` of the stored keys, softcapped if asked, and the sink `z` (an empty term without):

    log_sum_exp = log(exp(z) + sum_i exp(x_i))
    output      = sum_i exp(x_i - log_sum_exp) value_i
    mass_i     += mean over the query heads of a group of exp(x_i - log_sum_exp)

Split `s` sees only its own keys and leaves its own `(output_s, log_sum_exp_s)`; then
`output = sum_s exp(log_sum_exp_s - log_sum_exp) output_s`. The mass needs the final `log_sum_exp`,
so the first kernel keeps its logits in scratch and the second turns them into probabilities, with
no second product of query and keys. With one split the first kernel does it all.

All query heads of a group share a program, so keys are read once. Their number is padded to a power
of two only; the compiler pads it further to the 16 rows of a tensor core, in registers. So one path
serves every group: compiled for `G = 1`, it takes about as many registers as for `G = 4` and copies
keys and values to shared memory in the background, 16 bytes a thread, like the others.

Names: `p_` pointer, `b_` block of values, `o_` offsets in elements, `m_` mask. A block's shape is
in G (query heads of the group, padded to a power of two), N (keys), D and Dv (head sizes, padded).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch

MERGED_AT_ONCE = 8
"""Partial outputs that a merging program holds at once."""
MOST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 2


@triton.jit
def _bounds(
    p_lengths,
    p_offsets,
    row,
    head,
    capacity,
    splits,
    lengths_row,
    lengths_head,
    offsets_row,
    offsets_head,
    KEY_BLOCK: tl.constexpr,
    POOLED: tl.constexpr,
):
    """First slot of a head, its length, and keys per split: from the length, so that every head
    keeps all of its programs busy; a multiple of KEY_BLOCK, so that the last splits may be empty.
    """
    length = tl.load(p_lengths + row * lengths_row + head * lengths_head)
    first = row * 0
    if POOLED:
        first = tl.load(p_offsets + row * offsets_row + head * offsets_head)
    # A length that is too large must not become a read outside of the tensor.
    length = tl.minimum(length, capacity - first).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(length, splits), KEY_BLOCK) * KEY_BLOCK
    return first, length, per_split


@triton.jit
def _with_sinks(b_max, b_sum, b_sinks):
    """Running maximum and sum of exponentials after one more logit: `[G]` each."""
    b_new = tl.maximum(b_max, b_sinks)
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    return b_new, b_sum * tl.exp(b_max - b_shift) + tl.exp(b_sinks - b_shift)


@triton.jit
def _add_mass(
    p_logits,
    p_mass,
    b_log_sum_exp,
    start,
    stop,
    capacity,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """Add the probabilities of slots start .. stop - 1; pointers are those of the head's slot 0."""
    o_group = tl.arange(0, GROUP_BLOCK)
    m_group = o_group < GROUP
    for begin in tl.range(start, stop, KEY_BLOCK, num_stages=1):
        o_slot = begin + tl.arange(0, KEY_BLOCK)
        m_slot = o_slot < stop
        b_logits = tl.load(
            p_logits + o_group.to(tl.int64)[:, None] * capacity + o_slot[None, :],
            mask=m_group[:, None] & m_slot[None, :],
            other=float("-inf"),
        )
        b_probabilities = tl.where(m_group[:, None], tl.exp(b_logits - b_log_sum_exp[:, None]), 0.0)
        b_mean = tl.sum(b_probabilities, axis=0) / GROUP
        b_mass = tl.load(p_mass + o_slot, mask=m_slot, other=0.0)
        tl.store(p_mass + o_slot, b_mass + b_mean, mask=m_slot)


@triton.jit
def attend_split(
    p_query,
    p_keys,
    p_values,
    p_lengths,
    p_offsets,
    p_sinks,
    p_key_scales,
    p_value_scales,
    p_mass,
    p_logits,
    p_output,
    p_log_sum_exp,
    scaling,
    softcap,
    heads,
    capacity,
    splits,
    query_row,
    query_head,
    keys_row,
    keys_head,
    keys_slot,
    values_row,
    values_head,
    values_slot,
    lengths_row,
    lengths_head,
    offsets_row,
    offsets_head,
    key_scales_row,
    key_scales_head,
    value_scales_row,
    value_scales_head,
    mass_row,
    mass_head,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUANTISED: tl.constexpr,
    POOLED: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    """One program: one KV head with all of its query heads, one split of its keys.

    p_output and p_log_sum_exp are `[B, H, G, splits, Dv]` and `[B, H, G, splits]`, float32 scratch
    or, with one split, the results themselves.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    # Divided as int32: dividing int64 is a call, which spills registers.
    row = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    pair = pair.to(tl.int64)
    first, length, per_split = _bounds(
        p_lengths,
        p_offsets,
        row,
        head,
        capacity,
        splits,
        lengths_row,
        lengths_head,
        offsets_row,
        offsets_head,
        KEY_BLOCK,
        POOLED,
    )
    start = split * per_split
    stop = tl.minimum(start + per_split, length)
    if start >= stop and not ONE_SPLIT:
        return
    stored_head = head
    stored_heads = heads
    if POOLED:
        stored_head = head * 0
        stored_heads = 1

    o_group = tl.arange(0, GROUP_BLOCK)
    o_size = tl.arange(0, SIZE_BLOCK)
    o_value = tl.arange(0, VALUE_BLOCK)
    m_group = o_group < GROUP
    m_size = o_size < SIZE
    m_value = o_value < VALUE_SIZE
    o_query_head = head * GROUP + o_group
    b_query = tl.load(
        p_query + row * query_row + o_query_head[:, None] * query_head + o_size[None, :],
        mask=m_group[:, None] & m_size[None, :],
        other=0.0,
    )
    p_keys += row * keys_row + stored_head * keys_head + first * keys_slot
    p_values += row * values_row + stored_head * values_head + first * values_slot
    if QUANTISED:
        p_key_scales += row * key_scales_row + stored_head * key_scales_head + first
        p_value_scales += row * value_scales_row + stored_head * value_scales_head + first
    if p_mass is not None:
        p_mass += row * mass_row + stored_head * mass_head + first
        p_logits += (row * stored_heads + stored_head) * GROUP * capacity + first

    b_max = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    b_sum = tl.zeros([GROUP_BLOCK], tl.float32)
    b_output = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for begin in range(start, stop, KEY_BLOCK):
        o_slot = begin + tl.arange(0, KEY_BLOCK)
        m_slot = o_slot < stop
        o_row = o_slot.to(tl.int64)[:, None]
        b_keys = tl.load(
            p_keys + o_row * keys_slot + o_size[None, :],
            mask=m_slot[:, None] & m_size[None, :],
            other=0,
        )
        if QUANTISED:
            b_keys = b_keys.to(b_query.dtype)
        b_logits = tl.dot(b_query, tl.trans(b_keys), input_precision="ieee") * scaling
        if QUANTISED:
            b_logits *= tl.load(p_key_scales + o_slot, mask=m_slot, other=0.0)[None, :]
        if SOFTCAP:
            # tanh(y) = 1 - 2 / (exp(2 y) + 1); an infinite exponential gives 1.
            b_logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (b_logits / softcap)) + 1.0))
        b_logits = tl.where(m_slot[None, :], b_logits, float("-inf"))
        if p_mass is not None:
            tl.store(
                p_logits + o_group.to(tl.int64)[:, None] * capacity + o_slot[None, :],
                b_logits,
                mask=m_group[:, None] & m_slot[None, :],
            )
        b_new = tl.maximum(b_max, tl.max(b_logits, axis=1))
        b_correction = tl.exp(b_max - b_new)
        b_weights = tl.exp(b_logits - b_new[:, None])
        b_sum = b_sum * b_correction + tl.sum(b_weights, axis=1)
        b_max = b_new
        b_values = tl.load(
            p_values + o_row * values_slot + o_value[None, :],
            mask=m_slot[:, None] & m_value[None, :],
            other=0,
        )
        if QUANTISED:
            b_values = b_values.to(b_query.dtype)
            b_weights *= tl.load(p_value_scales + o_slot, mask=m_slot, other=0.0)[None, :]
        b_output = tl.dot(
            b_weights.to(b_query.dtype),
            b_values,
            b_output * b_correction[:, None],
            input_precision="ieee",
        )

    if ONE_SPLIT and p_sinks is not None:
        b_sinks = tl.load(p_sinks + o_query_head, mask=m_group, other=0.0).to(tl.float32)
        b_before = b_max
        b_max, b_sum = _with_sinks(b_max, b_sum, b_sinks)
        b_output *= tl.exp(b_before - tl.where(b_max == float("-inf"), 0.0, b_max))[:, None]
    b_output /= tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    b_log_sum_exp = b_max + tl.log(b_sum)
    o_partial = (pair * GROUP + o_group) * splits + split
    tl.store(p_log_sum_exp + o_partial, b_log_sum_exp, mask=m_group)
    tl.store(
        p_output + o_partial[:, None] * VALUE_SIZE + o_value[None, :],
        b_output.to(p_output.dtype.element_ty),
        mask=m_group[:, None] & m_value[None, :],
    )
    if ONE_SPLIT and p_mass is not None:
        # Other threads of this program stored the logits that a thread now loads.
        tl.debug_barrier()
        _add_mass(
            p_logits,
            p_mass,
            b_log_sum_exp,
            start,
            stop,
            capacity,
            GROUP,
            GROUP_BLOCK,
            KEY_BLOCK,
        )


@triton.jit
def merge_splits(
    p_lengths,
    p_offsets,
    p_sinks,
    p_mass,
    p_logits,
    p_partial,
    p_partial_log_sum_exp,
    p_output,
    p_log_sum_exp,
    heads,
    capacity,
    splits,
    lengths_row,
    lengths_head,
    offsets_row,
    offsets_head,
    mass_row,
    mass_head,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Program `i` of a KV head joins the output of query head `i` and adds the mass of split `i`:
    the work of both kinds is spread over programs that exist anyway.
    """
    pair = tl.program_id(0)
    part = tl.program_id(1)
    # Divided as int32: dividing int64 is a call, which spills registers.
    row = (pair // heads).to(tl.int64)
    head = (pair % heads).to(tl.int64)
    pair = pair.to(tl.int64)
    first, length, per_split = _bounds(
        p_lengths,
        p_offsets,
        row,
        head,
        capacity,
        splits,
        lengths_row,
        lengths_head,
        offsets_row,
        offsets_head,
        KEY_BLOCK,
        POOLED,
    )
    o_group = tl.arange(0, GROUP_BLOCK)
    m_group = o_group < GROUP
    o_split = tl.arange(0, SPLITS_BLOCK)
    # Empty splits stored nothing.
    m_split = (o_split < splits) & (o_split * per_split < length)
    p_partial_log_sum_exp += pair * GROUP * splits
    b_partial = tl.load(
        p_partial_log_sum_exp + o_group[:, None] * splits + o_split[None, :],
        mask=m_group[:, None] & m_split[None, :],
        other=float("-inf"),
    )
    b_max = tl.max(b_partial, axis=1)
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.sum(tl.exp(b_partial - b_shift[:, None]), axis=1)
    if p_sinks is not None:
        b_sinks = tl.load(p_sinks + head * GROUP + o_group, mask=m_group, other=0.0)
        b_max, b_sum = _with_sinks(b_max, b_sum, b_sinks.to(tl.float32))
    b_log_sum_exp = b_max + tl.log(b_sum)

    if part < GROUP:
        total = tl.max(tl.where(o_group == part, b_log_sum_exp, float("-inf")), axis=0)
        shift = tl.where(total == float("-inf"), 0.0, total)
        o_value = tl.arange(0, VALUE_BLOCK)
        m_value = o_value < VALUE_SIZE
        o_head = pair * GROUP + part
        b_output = tl.zeros([VALUE_BLOCK], tl.float32)
        for begin in range(0, splits, AT_ONCE):
            o_some = begin + tl.arange(0, AT_ONCE)
            m_some = (o_some < splits) & (o_some * per_split < length)
            b_some = tl.load(
                p_partial_log_sum_exp + part * splits + o_some, mask=m_some, other=float("-inf")
            )
            b_parts = tl.load(
                p_partial + (o_head * splits + o_some)[:, None] * VALUE_SIZE + o_value[None, :],
                mask=m_some[:, None] & m_value[None, :],
                other=0.0,
            )
            b_output += tl.sum(tl.exp(b_some - shift)[:, None] * b_parts, axis=0)
        tl.store(p_log_sum_exp + o_head, total)
        tl.store(
            p_output + o_head * VALUE_SIZE + o_value,
            b_output.to(p_output.dtype.element_ty),
            mask=m_value,
        )
    # Two conditions in one would not be decided while compiling.
    if p_mass is not None:  # noqa: SIM102
        if part < splits:
            stored_head = head
            stored_heads = heads
            if POOLED:
                stored_head = head * 0
                stored_heads = 1
            start = part * per_split
            _add_mass(
                p_logits + (row * stored_heads + stored_head) * GROUP * capacity + first,
                p_mass + row * mass_row + stored_head * mass_head + first,
                b_log_sum_exp,
                start,
                tl.minimum(start + per_split, length),
                capacity,
                GROUP,
                GROUP_BLOCK,
                KEY_BLOCK,
            )


class Configuration(NamedTuple):
    """Tile and launch options of `attend_split`."""

    key_block: int
    num_warps: int
    num_stages: int


def configuration(size: int, value_size: int, dtype: torch.dtype) -> Configuration:
    """Tile for the head sizes and the dtype of keys and values.

    From what the compiler reports for sm_80, sm_90 and sm_100: about 64 KiB of shared memory with
    two tiles under way, so that two programs or more fit a multiprocessor, and no spills; float32
    with head size 256 takes 133 KiB, which one program has. With
    `num_stages=2` and 64 keys the int8 kernels for head size 256 spilled.
    """
    row = triton.next_power_of_2(max(size, value_size)) * max(2, dtype.itemsize)
    return Configuration(64 if row <= 256 else 32, 4, 3)


def number_of_splits(pairs: int, slots: int, key_block: int, processors: int) -> int:
    """How many programs share a head, from what the host knows; lengths stay on the device.

    Args:
        pairs: rows times KV heads.
        slots: capacity of a head.
        key_block: keys of one tile, the least that a program gets.
        processors: multiprocessors of the device.
    """
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, max(pairs, 1))
    return max(1, min(wanted, triton.cdiv(slots, key_block), MOST_SPLITS))


@functools.lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.decode_attention.decode_attention`; lengths are `[B, H]` here.

    Args:
        splits: programs that share a KV head; None chooses.
    """
    batch, query_heads, _, size = query.shape
    heads = lengths.shape[1]
    group = query_heads // heads
    capacity, value_size = values.shape[2:]
    pooled = offsets is not None
    tile = configuration(size, value_size, keys.dtype)
    if splits is None:
        slots = triton.cdiv(capacity, heads) if pooled else capacity
        splits = number_of_splits(batch * heads, slots, tile.key_block, _processors(query.device))
    output = query.new_empty(batch, query_heads, 1, value_size)
    log_sum_exp = query.new_empty(batch, query_heads, dtype=torch.float32)
    partial, partial_log_sum_exp = output, log_sum_exp
    if splits > 1:
        partial = query.new_empty(batch, query_heads, splits, value_size, dtype=torch.float32)
        partial_log_sum_exp = query.new_empty(batch, query_heads, splits, dtype=torch.float32)
    logits = None
    if mass is not None:
        logits = query.new_empty(batch, keys.shape[1], group, capacity, dtype=torch.float32)
    group_block = triton.next_power_of_2(group)
    value_block = max(16, triton.next_power_of_2(value_size))
    common = {
        "GROUP": group,
        "GROUP_BLOCK": group_block,
        "VALUE_SIZE": value_size,
        "VALUE_BLOCK": value_block,
        "KEY_BLOCK": tile.key_block,
        "POOLED": pooled,
    }
    launch(
        attend_split,
        (batch * heads, splits),
        query.device,
        query,
        keys,
        values,
        lengths,
        offsets,
        sinks,
        key_scales,
        value_scales,
        mass,
        logits,
        partial,
        partial_log_sum_exp,
        scaling,
        softcap if softcap is not None else 0.0,
        heads,
        capacity,
        splits,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *lengths.stride(),
        *_two_strides(offsets),
        *_two_strides(key_scales),
        *_two_strides(value_scales),
        *_two_strides(mass),
        SIZE=size,
        SIZE_BLOCK=max(16, triton.next_power_of_2(size)),
        SOFTCAP=softcap is not None,
        QUANTISED=keys.dtype == torch.int8,
        ONE_SPLIT=splits == 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **common,
    )
    if splits > 1:
        launch(
            merge_splits,
            (batch * heads, group if mass is None else max(group, splits)),
            query.device,
            lengths,
            offsets,
            sinks,
            mass,
            logits,
            partial,
            partial_log_sum_exp,
            output,
            log_sum_exp,
            heads,
            capacity,
            splits,
            *lengths.stride(),
            *_two_strides(offsets),
            *_two_strides(mass),
            SPLITS_BLOCK=triton.next_power_of_2(splits),
            AT_ONCE=MERGED_AT_ONCE,
            num_warps=4,
            num_stages=1,
            **common,
        )
    return output, log_sum_exp


def _two_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))

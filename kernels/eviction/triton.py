"""Eviction in Triton: one launch plans for all layers and heads, one moves the rows of a tensor.

Plan, one program a head, with n stored tokens of which k stay:

    key(i)    = +inf for protected tokens, else the clamped score as an ordered integer
    threshold = the largest t with #{i : key(i) >= t} >= k, by bisection on the integers
    stays(i)  = key(i) > t, or key(i) = t and i is among the last that are needed to make k
    rank(i)   = how many before i stay, by a prefix sum over tiles

Hole filling pairs the j-th i with stays(i), slot(i) >= k with the j-th i with not stays(i),
slot(i) < k. Nothing is sorted and no float is computed with: the result is exact.

Moves copy bytes in the widest words that addresses and row size allow; the dtype does not matter.

Names: `p_` pointer, `b_` value of a block, `o_` offsets, `m_` mask. All addresses are int64.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..layer_table import layer_table
from .types import slot_dtype

# The scores' order as integers: the lowest and the largest finite float32. Protected tokens lie
# above, and what is not a token lies below.
_LOWEST = tl.constexpr(-2139095040)
_LARGEST = tl.constexpr(2139095039)
_PROTECTED = tl.constexpr(2147483647)
_NO_TOKEN = tl.constexpr(-2147483648)

# A plan is compiled once for a block size, not again for every size that it meets.
_SIZES = [
    f"{name}_{step}" for name in ("scores", "lengths", "keep") for step in ("layer", "row", "head")
]
_SIZES += ["rows", "heads", "stored", "most_evicted", "most_kept", "window", "sinks"]


@triton.jit
def which_head(rows, heads):
    """Number of this program, and its layer, row and head, all int64."""
    program = tl.program_id(0)
    # Divided as int32: dividing int64 is a call, which spills registers.
    layer, row, head = program // heads // rows, program // heads % rows, program % heads
    return program.to(tl.int64), layer.to(tl.int64), row.to(tl.int64), head.to(tl.int64)


@triton.jit
def stride(p_table, layer, dimension: tl.constexpr, UNIT: tl.constexpr):
    """A stride in elements from a table of `layer_table`, known to be a multiple of `UNIT`."""
    # Multiplying tells the compiler so; a hint on a loaded number is lost in Triton 3.6, and with
    # it the 16-byte loads.
    return tl.load(p_table + layer * 4 + 1 + dimension) // UNIT * UNIT


@triton.jit
def head_pointer(p_table, layer, row, head, WORD: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Where a head's first slot lies, from a table whose addresses are multiples of `ALIGNMENT`."""
    UNIT: tl.constexpr = ALIGNMENT * 8 // WORD.primitive_bitwidth
    p_base = tl.multiple_of(tl.load(p_table + layer * 4).to(tl.pointer_type(WORD)), ALIGNMENT)
    return p_base + row * stride(p_table, layer, 0, UNIT) + head * stride(p_table, layer, 1, UNIT)


@triton.jit
def ordered_keys(b_scores):
    """float32 to int32 such that integers compare as the scores do, NaN and infinities clamped."""
    b_bits = b_scores.to(tl.int32, bitcast=True)
    b_keys = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b_keys = tl.where(b_keys == -1, 0, b_keys)  # -0.0 equals 0.0
    b_keys = tl.minimum(tl.maximum(b_keys, _LOWEST), _LARGEST)
    return tl.where((b_bits & 0x7FFFFFFF) > 0x7F800000, _LOWEST, b_keys)


@triton.jit
def token_keys(p_scores, p_positions, o_token, length, window, sinks):
    """Ordered keys of a head's tokens: the most for protected ones, the least beyond the length."""
    m_token = o_token < length
    b_scores = tl.load(p_scores + o_token, mask=m_token, other=0.0)
    b_positions = tl.load(p_positions + o_token, mask=m_token, other=0)
    b_keys = ordered_keys(b_scores)
    b_keys = tl.where((b_positions < sinks) | (o_token >= length - window), _PROTECTED, b_keys)
    return tl.where(m_token, b_keys, _NO_TOKEN)


@triton.jit
def find_threshold(p_scores, p_positions, length, limit, window, sinks, BLOCK: tl.constexpr):
    """The threshold at which `limit` of a head's tokens stay, with `limit < length`.

    Returns it, and how many of the oldest tokens whose key equals it leave all the same.
    """
    b_keys = token_keys(p_scores, p_positions, tl.arange(0, BLOCK), length, window, sinks)
    low = tl.full((), _LOWEST, tl.int64)
    high = tl.full((), _PROTECTED, tl.int64)
    count = length
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        reached = tl.sum((b_keys >= middle.to(tl.int32)).to(tl.int32))
        # A threshold that splits exactly needs no closer search.
        high = tl.where(reached >= limit, tl.where(reached == limit, middle, high), middle - 1)
        low = tl.where(reached >= limit, middle, low)
        count = tl.where(reached >= limit, reached, count)
    return low.to(tl.int32), count - limit


@triton.jit
def choose(b_keys, threshold, skipped, equals):
    """Which tokens of a tile stay, and the updated count of `equals` seen up to its end."""
    b_equal = (b_keys == threshold).to(tl.int32)
    m_chosen = (b_keys > threshold) | ((b_equal == 1) & (equals + tl.cumsum(b_equal, 0) > skipped))
    return m_chosen, equals + tl.sum(b_equal)


@triton.jit
def store_survivors(p_kept, o_token, m_chosen, survivors, limit, most_kept):
    """List the indices of a tile's survivors; places behind the list get their own index."""
    b_rank = survivors + tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    tl.store(p_kept + b_rank, o_token, mask=m_chosen & (b_rank < most_kept))
    tl.store(p_kept + o_token, o_token, mask=(o_token >= limit) & (o_token < most_kept))


@triton.jit(do_not_specialize=_SIZES)
def plan_hole_filling_kernel(
    p_scores,  # [L, B, H, S] float32
    p_positions,  # [L, 4] int64, table of [B, H, C] int32
    p_order,  # [L, 4] int64, table of [B, H, C] int32
    p_lengths,  # [L, B, H] int32
    p_keep,  # [L, B, H] int32
    p_sources,  # [L, B, H, M] int16
    p_targets,  # [L, B, H, M] int16
    p_moves,  # [L, B, H] int32
    p_kept,  # [L, B, H, K] int32
    scores_layer,
    scores_row,
    scores_head,
    lengths_layer,
    lengths_row,
    lengths_head,
    keep_layer,
    keep_row,
    keep_head,
    rows,
    heads,
    stored,
    most_evicted,
    most_kept,
    window,
    sinks,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    program, layer, row, head = which_head(rows, heads)
    length = tl.load(p_lengths + layer * lengths_layer + row * lengths_row + head * lengths_head)
    limit = tl.load(p_keep + layer * keep_layer + row * keep_row + head * keep_head)
    length = tl.minimum(length, stored)
    p_sources += program * most_evicted
    p_targets += program * most_evicted
    p_kept += program * most_kept
    moves = length * 0
    if limit < length:
        p_places = head_pointer(p_positions, layer, row, head, tl.int32, 4)
        p_slots = head_pointer(p_order, layer, row, head, tl.int32, 4)
        p_scores += layer * scores_layer + row * scores_row + head * scores_head
        threshold, skipped = find_threshold(
            p_scores, p_places, length, limit, window, sinks, BLOCK=BLOCK
        )
        equals = length * 0
        holes = length * 0
        survivors = length * 0
        # What is recorded has places for more than this head's tokens.
        for start in tl.range(0, stored if RECORD else length, TILE, num_stages=1):
            o_token = start + tl.arange(0, TILE)
            b_keys = token_keys(p_scores, p_places, o_token, length, window, sinks)
            m_chosen, equals = choose(b_keys, threshold, skipped, equals)
            m_token = o_token < length
            b_slots = tl.load(p_slots + o_token, mask=m_token, other=0)
            b_move = (m_chosen & (b_slots >= limit)).to(tl.int32)
            b_hole = (m_token & (b_slots < limit) & (m_chosen == 0)).to(tl.int32)
            o_move = moves + tl.cumsum(b_move, 0) - 1
            o_hole = holes + tl.cumsum(b_hole, 0) - 1
            tl.store(p_sources + o_move, b_slots, mask=(b_move == 1) & (o_move < most_evicted))
            tl.store(p_targets + o_hole, b_slots, mask=(b_hole == 1) & (o_hole < most_evicted))
            if RECORD:
                store_survivors(p_kept, o_token, m_chosen, survivors, limit, most_kept)
                survivors += tl.sum(m_chosen.to(tl.int32))
            moves += tl.sum(b_move)
            holes += tl.sum(b_hole)

        # From here on every thread sees all targets.
        tl.debug_barrier()
        equals = length * 0
        moves = length * 0
        survivors = length * 0
        for start in tl.range(0, length, TILE, num_stages=1):
            o_token = start + tl.arange(0, TILE)
            b_keys = token_keys(p_scores, p_places, o_token, length, window, sinks)
            m_chosen, equals = choose(b_keys, threshold, skipped, equals)
            b_places = tl.load(p_places + o_token, mask=m_chosen, other=0)
            b_slots = tl.load(p_slots + o_token, mask=m_chosen, other=0)
            m_move = m_chosen & (b_slots >= limit)
            o_move = moves + tl.cumsum(m_move.to(tl.int32), 0) - 1
            m_listed = m_move & (o_move < most_evicted)
            b_taken = tl.load(p_targets + o_move, mask=m_listed, other=0).to(tl.int32)
            b_slots = tl.where(m_move, b_taken, b_slots)
            o_rank = survivors + tl.cumsum(m_chosen.to(tl.int32), 0) - 1
            moves += tl.sum(m_move.to(tl.int32))
            survivors += tl.sum(m_chosen.to(tl.int32))
            # A survivor's new place may be another's old one in this tile; later tiles only read
            # places behind this one.
            tl.debug_barrier()
            tl.store(p_slots + o_rank, b_slots, mask=m_chosen)
            tl.store(p_places + o_rank, b_places, mask=m_chosen)
        moves = tl.minimum(moves, most_evicted)
    elif RECORD:
        o_token = tl.arange(0, BLOCK)
        tl.store(p_kept + o_token, o_token, mask=o_token < most_kept)
    tl.store(p_moves + program, moves)
    for start in tl.range(0, most_evicted, TILE, num_stages=1):
        o_pair = start + tl.arange(0, TILE)
        m_rest = (o_pair >= moves) & (o_pair < most_evicted)
        tl.store(p_sources + o_pair, -1, mask=m_rest)
        tl.store(p_targets + o_pair, -1, mask=m_rest)


@triton.jit(do_not_specialize=[each for each in _SIZES if each != "most_evicted"])
def plan_compaction_kernel(
    p_scores,  # [L, B, H, S] float32
    p_positions,  # [L, 4] int64, table of [B, H, C] int32
    p_lengths,  # [L, B, H] int32
    p_keep,  # [L, B, H] int32
    p_kept,  # [L, B, H, K] int32
    scores_layer,
    scores_row,
    scores_head,
    lengths_layer,
    lengths_row,
    lengths_head,
    keep_layer,
    keep_row,
    keep_head,
    rows,
    heads,
    stored,
    most_kept,
    window,
    sinks,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    program, layer, row, head = which_head(rows, heads)
    length = tl.load(p_lengths + layer * lengths_layer + row * lengths_row + head * lengths_head)
    limit = tl.load(p_keep + layer * keep_layer + row * keep_row + head * keep_head)
    length = tl.minimum(length, stored)
    p_kept += program * most_kept
    if limit < length:
        p_places = head_pointer(p_positions, layer, row, head, tl.int32, 4)
        p_scores += layer * scores_layer + row * scores_row + head * scores_head
        threshold, skipped = find_threshold(
            p_scores, p_places, length, limit, window, sinks, BLOCK=BLOCK
        )
        equals = length * 0
        survivors = length * 0
        for start in tl.range(0, stored, TILE, num_stages=1):
            o_token = start + tl.arange(0, TILE)
            b_keys = token_keys(p_scores, p_places, o_token, length, window, sinks)
            m_chosen, equals = choose(b_keys, threshold, skipped, equals)
            store_survivors(p_kept, o_token, m_chosen, survivors, limit, most_kept)
            survivors += tl.sum(m_chosen.to(tl.int32))
    else:
        o_token = tl.arange(0, BLOCK)
        tl.store(p_kept + o_token, o_token, mask=o_token < most_kept)


@triton.jit
def fill_holes_kernel(
    p_tensors,  # [L, 4] int64, table of [B, H, C, WORDS]
    p_sources,  # [L, B, H, M] int16 or int32
    p_targets,  # [L, B, H, M] int16 or int32
    p_moves,  # [L, B, H] int32
    rows,
    heads,
    most_evicted,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes that all addresses are a multiple of, at most 16
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_MOVES: tl.constexpr,
):
    program, layer, row, head = which_head(rows, heads)
    moves = tl.load(p_moves + program)
    o_move = tl.program_id(1) * BLOCK_MOVES + tl.arange(0, BLOCK_MOVES)
    if tl.program_id(1) * BLOCK_MOVES < moves:
        o_word = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        p_head = head_pointer(p_tensors, layer, row, head, WORD, ALIGNMENT)
        step = stride(p_tensors, layer, 2, ALIGNMENT * 8 // WORD.primitive_bitwidth)
        m_move = o_move < moves
        o_pair = program * most_evicted + o_move
        b_sources = tl.load(p_sources + o_pair, mask=m_move, other=0)
        b_targets = tl.load(p_targets + o_pair, mask=m_move, other=0)
        mask = m_move[:, None] & (o_word < WORDS)[None, :]
        b_rows = tl.load(p_head + b_sources[:, None] * step + o_word[None, :], mask=mask)
        tl.store(p_head + b_targets[:, None] * step + o_word[None, :], b_rows, mask=mask)


@triton.jit
def compact_kernel(
    p_tensors,  # [L, 4] int64, table of [B, H, C, WORDS]
    p_kept,  # [L, B, H, K] int32
    p_keep,  # [L, B, H] int32
    keep_layer,
    keep_row,
    keep_head,
    rows,
    heads,
    most_kept,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes that all addresses are a multiple of, at most 16
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_MOVES: tl.constexpr,
):
    program, layer, row, head = which_head(rows, heads)
    limit = tl.load(p_keep + layer * keep_layer + row * keep_row + head * keep_head)
    limit = tl.minimum(limit, most_kept)
    p_kept += program * most_kept
    o_word = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    p_head = head_pointer(p_tensors, layer, row, head, WORD, ALIGNMENT)
    step = stride(p_tensors, layer, 2, ALIGNMENT * 8 // WORD.primitive_bitwidth)
    for start in tl.range(0, limit, BLOCK_MOVES, num_stages=1):
        # The distance kept[j] - j only grows: a block whose last row stays has nothing to move.
        last = tl.minimum(start + BLOCK_MOVES, limit) - 1
        if tl.load(p_kept + last) != last:
            o_slot = start + tl.arange(0, BLOCK_MOVES)
            b_sources = tl.load(p_kept + o_slot, mask=o_slot < limit, other=0)
            m_move = (o_slot < limit) & (b_sources != o_slot)
            mask = m_move[:, None] & (o_word < WORDS)[None, :]
            b_rows = tl.load(p_head + b_sources[:, None] * step + o_word[None, :], mask=mask)
            # A row of this block may be the source of another. Later blocks only read slots
            # behind this one.
            tl.debug_barrier()
            tl.store(p_head + o_slot[:, None] * step + o_word[None, :], b_rows, mask=mask)


def plan_hole_filling(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    window: int,
    sinks: int,
    most_evicted: int,
    most_kept: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `api.plan_hole_filling`; returns sources, targets, moves and kept `[.., most_kept]`."""
    layers, rows, heads, stored = scores.shape
    sources = scores.new_empty((layers, rows, heads, most_evicted), dtype=slot_dtype(stored))
    targets = torch.empty_like(sources)
    moves = scores.new_empty((layers, rows, heads), dtype=torch.int32)
    kept = scores.new_empty((layers, rows, heads, most_kept), dtype=torch.int32)
    if scores.numel() == 0:
        return sources, targets, moves.zero_(), kept
    shape, warps = plan_shape(stored)
    launch(
        plan_hole_filling_kernel,
        (layers * rows * heads,),
        scores.device,
        scores,
        layer_table(positions),
        layer_table(order),
        lengths,
        keep,
        sources,
        targets,
        moves,
        kept,
        *scores.stride()[:3],
        *lengths.stride(),
        *keep.stride(),
        rows,
        heads,
        stored,
        most_evicted,
        most_kept,
        window,
        sinks,
        RECORD=most_kept > 0,
        **shape,
        num_warps=warps,
        num_stages=1,
    )
    return sources, targets, moves, kept


def plan_compaction(
    scores: torch.Tensor,
    positions: list[torch.Tensor],
    lengths: torch.Tensor,
    keep: torch.Tensor,
    *,
    window: int,
    sinks: int,
    most_kept: int,
) -> torch.Tensor:
    """See `api.plan_compaction`."""
    layers, rows, heads, stored = scores.shape
    kept = scores.new_empty((layers, rows, heads, most_kept), dtype=torch.int32)
    if kept.numel() == 0:
        return kept
    shape, warps = plan_shape(stored)
    launch(
        plan_compaction_kernel,
        (layers * rows * heads,),
        scores.device,
        scores,
        layer_table(positions),
        lengths,
        keep,
        kept,
        *scores.stride()[:3],
        *lengths.stride(),
        *keep.stride(),
        rows,
        heads,
        stored,
        most_kept,
        window,
        sinks,
        **shape,
        num_warps=warps,
        num_stages=1,
    )
    return kept


def fill_holes(
    tensors: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor, moves: torch.Tensor
) -> None:
    """See `api.fill_holes`."""
    layers, rows, heads, most_evicted = sources.shape
    if sources.numel() == 0 or tensors[0].numel() == 0:
        return
    words, alignment = as_words(tensors)
    shape = move_shape(words[0].shape[3], words[0].element_size())
    grid = (
        layers * rows * heads,
        triton.cdiv(most_evicted, shape["BLOCK_MOVES"]),
        triton.cdiv(words[0].shape[3], shape["BLOCK_WORDS"]),
    )
    launch(
        fill_holes_kernel,
        grid,
        sources.device,
        layer_table(words),
        sources.contiguous(),
        targets.contiguous(),
        moves.contiguous(),
        rows,
        heads,
        most_evicted,
        WORD=WORD_TYPES[words[0].element_size()],
        ALIGNMENT=alignment,
        WORDS=words[0].shape[3],
        **shape,
        num_warps=4,
        num_stages=1,
    )


def compact(tensors: list[torch.Tensor], kept: torch.Tensor, keep: torch.Tensor) -> None:
    """See `api.compact`."""
    layers, rows, heads, most_kept = kept.shape
    if kept.numel() == 0 or tensors[0].numel() == 0:
        return
    words, alignment = as_words(tensors)
    shape = move_shape(words[0].shape[3], words[0].element_size())
    launch(
        compact_kernel,
        (layers * rows * heads, triton.cdiv(words[0].shape[3], shape["BLOCK_WORDS"])),
        kept.device,
        layer_table(words),
        kept.contiguous(),
        keep,
        *keep.stride(),
        rows,
        heads,
        most_kept,
        WORD=WORD_TYPES[words[0].element_size()],
        ALIGNMENT=alignment,
        WORDS=words[0].shape[3],
        **shape,
        num_warps=4,
        num_stages=1,
    )


WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_TORCH_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plan_shape(stored: int) -> tuple[dict[str, int], int]:
    """Tokens a program searches at once and lists at once, and its warps.

    A thread searches 16 tokens, up to 8192 stored: with 32, programs of one and two warps spilled.
    Lists are made by tiles: at once, their offsets would spill.
    """
    block = max(32, triton.next_power_of_2(stored))
    warps = max(1, min(16, block // 512))
    return {"BLOCK": block, "TILE": min(block, 128 * warps)}, warps


def move_shape(words: int, word_bytes: int) -> dict[str, int]:
    """Block sizes for rows of so many words: about 16 KiB a block, 128 bytes a thread."""
    block_words = min(triton.next_power_of_2(words), 2048)
    return {
        "BLOCK_WORDS": block_words,
        "BLOCK_MOVES": max(1, min(128, 16384 // word_bytes // block_words)),
    }


def as_words(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """View rows as integers of up to 8 bytes.

    Returns:
        Tensors `[B, H, C, words]`, and how many bytes (at most 16) all their addresses are a
        multiple of.
    """
    rows = [each if each.dim() == 4 and each.shape[3] > 1 else _column(each) for each in tensors]
    size = rows[0].element_size()
    alignment = math.gcd(16, rows[0].shape[3] * size)
    for each in rows:
        alignment = math.gcd(alignment, each.data_ptr(), *(n * size for n in each.stride()[:3]))
    word = min(alignment, 8)
    return [each.view(_TORCH_TYPES[word]) for each in rows], alignment


def _column(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor[..., 0] if tensor.dim() == 4 else tensor).unsqueeze(-1)

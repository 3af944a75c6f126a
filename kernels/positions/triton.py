"""New positions of all layers in one launch: `positions[i] = seen - length + i`, `order[i] = i`.

Names: `p_` pointer, `b_` block of values, `o_` offsets, `m_` mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..layer_table import layer_table

TILE = 256


@triton.jit
def append_positions_kernel(
    p_positions_table,
    p_order_table,
    p_lengths,
    p_placed,
    p_seen,
    lengths_layer,
    lengths_row,
    lengths_head,
    placed_layer,
    placed_row,
    placed_head,
    seen_layer,
    seen_row,
    seen_head,
    rows,
    heads,
    HAS_ORDER: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a head."""
    program = tl.program_id(0)
    # Divided as int32: dividing int64 is a call, which spills registers.
    head = (program % heads).to(tl.int64)
    row = (program // heads % rows).to(tl.int64)
    layer = (program // heads // rows).to(tl.int64)
    length = tl.load(p_lengths + layer * lengths_layer + row * lengths_row + head * lengths_head)
    placed = tl.load(p_placed + layer * placed_layer + row * placed_row + head * placed_head)
    seen = tl.load(p_seen + layer * seen_layer + row * seen_row + head * seen_head)
    p_entry = p_positions_table + layer * 4
    p_positions = tl.load(p_entry).to(tl.pointer_type(tl.int32))
    p_positions += row * tl.load(p_entry + 1) + head * tl.load(p_entry + 2)
    for start in range(placed, length, TILE):
        o_index = start + tl.arange(0, TILE)
        tl.store(p_positions + o_index, seen - length + o_index, mask=o_index < length)
    if HAS_ORDER:
        p_entry = p_order_table + layer * 4
        p_order = tl.load(p_entry).to(tl.pointer_type(tl.int32))
        p_order += row * tl.load(p_entry + 1) + head * tl.load(p_entry + 2)
        for start in range(placed, length, TILE):
            o_index = start + tl.arange(0, TILE)
            tl.store(p_order + o_index, o_index, mask=o_index < length)


def append_positions(
    positions: list[torch.Tensor],
    order: list[torch.Tensor] | None,
    lengths: torch.Tensor,
    placed: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    """See `api.append_positions`."""
    table = layer_table(positions)
    launch(
        append_positions_kernel,
        (lengths.numel(),),
        lengths.device,
        table,
        table if order is None else layer_table(order),
        lengths,
        placed,
        seen,
        *lengths.stride(),
        *placed.stride(),
        *seen.stride(),
        lengths.shape[1],
        lengths.shape[2],
        HAS_ORDER=order is not None,
        TILE=TILE,
        num_warps=2,
        num_stages=1,
    )

"""The configurations that are shipped."""

from __future__ import annotations

from ..ahead_of_time.case import Case
from .triton import TILE, append_positions_kernel

_STRIDES = (
    *("lengths_layer", "lengths_row", "lengths_head"),
    *("placed_layer", "placed_row", "placed_head"),
    *("seen_layer", "seen_row", "seen_head"),
)


def cases() -> list[Case]:
    """With and without an order."""
    pointers = {"p_positions_table": "*i64", "p_order_table": "*i64"}
    pointers |= {"p_lengths": "*i32", "p_placed": "*i32", "p_seen": "*i32"}
    numbers = dict.fromkeys((*_STRIDES, "rows", "heads"), "i32")
    return [
        Case(
            operation="positions",
            variant="with order" if has_order else "without order",
            kernel=append_positions_kernel,
            signature=pointers | numbers,
            constants={"HAS_ORDER": has_order, "TILE": TILE},
            divisible_by_16=tuple(pointers),
            num_warps=2,
            # It only stores, apart from three numbers a head.
            wide_loads=False,
        )
        for has_order in (False, True)
    ]

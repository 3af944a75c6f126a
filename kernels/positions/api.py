"""Positions are written when an eviction needs them, for all new tokens of all layers at once.

While decoding, tokens arrive in order, so their positions follow from two counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..availability import choose_implementation
from ..stored_keys import check_layers, check_shape, check_tensor


def append_positions(
    positions: Sequence[torch.Tensor],
    order: Sequence[torch.Tensor] | None,
    lengths: torch.Tensor,
    placed: torch.Tensor,
    seen: torch.Tensor,
    *,
    implementation: str = "auto",
) -> None:
    """Write entries `placed .. lengths - 1` of every head, in place.

    The i-th oldest token gets the position `seen - length + i` and lies in slot i.

    Args:
        positions: one `[B, H, C]` int32 a layer, contiguous along `C`.
        order: one `[B, H, C]` int32 a layer, contiguous along `C`; None: slots are in the order of
            the sequence, so there is none.
        lengths: `[L, B, H]` int32, tokens stored, at most `C`; expanded tensors are fine.
        placed: `[L, B, H]` int32, tokens whose entries are there.
        seen: `[L, B, H]` int32, real tokens seen by the row.
        implementation: `"auto"`, `"reference"` or `"triton"`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, stride or device is wrong.
        RuntimeError: `implementation="triton"` cannot run here.
    """
    check_layers("positions", positions, len(positions))
    device = positions[0].device
    heads = (len(positions), *positions[0].shape[:2])
    for name, tensors in (("positions", positions), ("order", order or ())):
        for layer, each in enumerate(tensors):
            check_tensor(f"{name}[{layer}]", each, 3, (torch.int32,), device)
            if each.shape[:2] != heads[1:] or each.stride(2) != 1:
                raise ValueError(
                    f"{name}[{layer}] must be contiguous along its slots, with {heads[1]} rows "
                    f"and {heads[2]} heads, and it has shape {tuple(each.shape)} and strides "
                    f"{each.stride()}."
                )
    if order is not None:
        check_layers("order", order, len(positions))
    for name, tensor in (("lengths", lengths), ("placed", placed), ("seen", seen)):
        check_tensor(name, tensor, 3, (torch.int32,), device)
        check_shape(name, tensor, heads)
    _append_positions(list(positions), list(order or ()), lengths, placed, seen, implementation)


@torch.library.custom_op(
    "sparse_budget_cache::append_positions",
    mutates_args=("positions", "order"),
    schema=(
        "(Tensor(a!)[] positions, Tensor(b!)[] order, Tensor lengths, Tensor placed, Tensor seen, "
        "str implementation) -> ()"
    ),
)
def _append_positions(
    positions: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    placed: torch.Tensor,
    seen: torch.Tensor,
    implementation: str,
) -> None:
    if choose_implementation(implementation, positions[0].device) == "triton":
        from . import triton as chosen
    else:
        from . import reference as chosen  # type: ignore[no-redef]
    chosen.append_positions(positions, order or None, lengths, placed, seen)


@_append_positions.register_fake
def _(
    positions: list[torch.Tensor],
    order: list[torch.Tensor],
    lengths: torch.Tensor,
    placed: torch.Tensor,
    seen: torch.Tensor,
    implementation: str,
) -> None:
    return None

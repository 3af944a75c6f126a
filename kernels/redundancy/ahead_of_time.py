"""Configurations of the redundancy kernels to compile ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from ..ahead_of_time import Case
from .triton import TYPES, directions_kernel, softmax_kernel, tiles, totals_kernel

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}
_INTEGERS = (
    "stride_lengths_layer",
    "stride_lengths_row",
    "stride_lengths_head",
    "rows",
    "heads",
    "stored",
)
_TABLES = {"p_keys_table": "*i64", "p_order_table": "*i64"}
_BUFFERS = {"p_lengths": "*i32", "p_factors": "*fp32", "p_totals": "*i32", "p_sums": "*fp32"}


def cases() -> list[Case]:
    """Each dtype and head size; the softmax has one configuration."""
    found = []
    for key_type, *sizes in (
        (torch.bfloat16, 64, 80, 128, 256),
        (torch.float16, 80, 128),
        (torch.float32, 64, 80, 128, 256),
        (torch.int8, 64, 128, 256),
    ):
        for size in sizes:
            found += _of_keys(key_type, size, ordered=True)
    found += _of_keys(torch.bfloat16, 128, ordered=False)
    pointers = {"p_lengths": "*i32", "p_totals": "*i32", "p_redundancy": "*fp32"}
    softmax = tiles(torch.float32, 128)["softmax"]
    return [*found, _case(softmax_kernel, "softmax", pointers, _INTEGERS, {}, softmax)]


def _of_keys(key_type: torch.dtype, head_size: int, ordered: bool) -> list[Case]:
    constants = {
        "KEY_TYPE": TYPES[key_type],
        "HEAD_SIZE": head_size,
        "ORDERED": ordered,
        "ALIGNMENT": 16,
    }
    name = f"{_NAMES[key_type]} D{head_size}" + ("" if ordered else " slots in order")
    sizes = tiles(key_type, head_size)
    dot_type = TYPES[torch.float16 if key_type == torch.int8 else key_type]
    return [
        _case(
            directions_kernel,
            f"directions {name}",
            {**_TABLES, "p_scales_table": "*i64", **_BUFFERS},
            (*_INTEGERS, "parts"),
            {**constants, "SCALED": key_type == torch.int8},
            sizes["directions"],
        ),
        _case(
            totals_kernel,
            f"totals {name}",
            {**_TABLES, **_BUFFERS},
            (*_INTEGERS, "parts"),
            {**constants, "DOT_TYPE": dot_type},
            sizes["totals"],
            {"threshold": "fp32"},
        ),
    ]


def _case(
    kernel: Any,
    variant: str,
    pointers: dict[str, str],
    integers: tuple[str, ...],
    constants: dict[str, Any],
    sizes: dict[str, Any],
    numbers: dict[str, str] | None = None,
) -> Case:
    options = dict(sizes)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    return Case(
        operation="redundancy",
        variant=variant,
        kernel=kernel,
        signature={**pointers, **dict.fromkeys(integers, "i32"), **(numbers or {})},
        constants={**constants, **options},
        divisible_by_16=tuple(pointers),
        num_warps=warps,
        num_stages=stages,
    )

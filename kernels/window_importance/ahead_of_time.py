"""Configurations of window importance to compile ahead of time."""

from __future__ import annotations

import torch

from ..ahead_of_time import Case
from .triton import TYPES, tiles, window_importance_kernel

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
    "queries",
    "window",
    "stored",
)


def cases() -> list[Case]:
    """R-KV in each dtype and head size, and what differs in code: SnapKV, TOVA, maxima, slots in
    order, groups of 1, 7 and 71, windows of several chunks."""
    bf16, fp16, fp32, int8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
    return [
        *(_case(bf16, bf16, size, 4, 8) for size in (64, 80, 128, 256)),
        _case(fp16, fp16, 128, 4, 8),
        _case(fp32, fp32, 128, 4, 8),
        *(_case(int8, bf16, size, 4, 8) for size in (64, 80, 128, 256)),
        _case(int8, fp32, 128, 4, 8),
        _case(bf16, bf16, 128, 7, 8, maximum=True),
        _case(bf16, bf16, 128, 1, 8, ordered=False),
        _case(bf16, bf16, 128, 4, 32, older=False),
        _case(int8, bf16, 128, 4, 32, older=False),
        _case(bf16, bf16, 128, 8, 64, older=False, maximum=True),
        _case(bf16, bf16, 128, 8, 64),
        *(_case(bf16, bf16, 128, group, 1, older=False) for group in (1, 4, 8)),
        _case(bf16, bf16, 64, 71, 8),
    ]


def _case(
    key_type: torch.dtype,
    query_type: torch.dtype,
    head_size: int,
    group: int,
    queries: int,
    *,
    older: bool = True,
    maximum: bool = False,
    ordered: bool = True,
) -> Case:
    options = tiles(query_type, group, queries, head_size, older)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    words = [_NAMES[key_type], f"D{head_size}", f"G{group}", f"W{queries}"]
    if key_type == torch.int8:
        words.insert(1, f"queries {_NAMES[query_type]}")
    words += ["older" if older else "causal", "max" if maximum else "mean"]
    if not ordered:
        words.append("slots in order")
    pointers = {"p_queries_table": "*i64", "p_keys_table": "*i64", "p_order_table": "*i64"}
    pointers |= {"p_scales_table": "*i64", "p_lengths": "*i32"}
    pointers |= {"p_importance": "*fp32", "p_statistics": "*fp32"}
    return Case(
        operation="window_importance",
        variant=" ".join(words),
        kernel=window_importance_kernel,
        signature={**pointers, **dict.fromkeys(_INTEGERS, "i32"), "scaling": "fp32"},
        constants={
            "QUERY_TYPE": TYPES[query_type],
            "KEY_TYPE": TYPES[key_type],
            "GROUP": group,
            "HEAD_SIZE": head_size,
            "OLDER": older,
            "MAX": maximum,
            "ORDERED": ordered,
            "SCALED": key_type == torch.int8,
            "KEY_ALIGNMENT": 16,
            "QUERY_ALIGNMENT": 16,
            **options,
        },
        divisible_by_16=tuple(pointers),
        num_warps=warps,
        num_stages=stages,
        in_place=options["CHUNKS"] > 1,
    )

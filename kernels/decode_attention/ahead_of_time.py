"""The configurations of decode attention that are compiled ahead of time, as a check.

Alignment: the allocator aligns tensors to more than 16 bytes, and all head sizes here are multiples
of 16, so that Triton's launcher finds the pointers and strides below divisible by 16.

Width: keys and values have to come through wide loads. The logits and partial results that a
kernel reads back from scratch (merging, and the mass of a single split) come 4 bytes a thread, side
by side: `4 G` bytes a key, beside the `4 D` of a 16-bit key and value, of a length that only the
device knows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..ahead_of_time import Case
from .triton import MERGED_AT_ONCE, MOST_SPLITS, attend_split, configuration, merge_splits

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
INTEGERS = (
    *("heads", "capacity", "splits", "query_row", "query_head"),
    *("keys_row", "keys_head", "keys_slot", "values_row", "values_head", "values_slot"),
    *("lengths_row", "lengths_head", "offsets_row", "offsets_head"),
    *("key_scales_row", "key_scales_head", "value_scales_row", "value_scales_head"),
    *("mass_row", "mass_head"),
)
ALIGNED_INTEGERS = tuple(name for name in INTEGERS if name.startswith(("query", "keys", "values")))


def cases() -> list[Case]:
    """Every head size with every group, and each other dtype, int8 and feature where it costs most
    registers or makes different code. float16 compiles as bfloat16 does, so it has fewer."""
    found = [_attend("bf16", size, group) for size in (64, 80, 128, 256) for group in (1, 4, 8)]
    found += [_attend("fp16", 64, 1), _attend("fp16", 128, 4), _attend("fp16", 256, 8)]
    found += [_attend("fp32", size, 4) for size in (128, 256)]
    found += [
        _attend("bf16", size, group, int8=True)
        for size, group in ((64, 8), (80, 4), (128, 1), (128, 4), (256, 8))
    ]
    found += [
        _attend("bf16", 128, 7, one_split=True),
        _attend("bf16", 128, 4, one_split=True, int8=True),
        _attend("bf16", 128, 4, mass=False),
        _attend("bf16", 256, 4, softcap=True, value_size=128),
        _attend("bf16", 64, 8, sinks=True, one_split=True),
        _attend("bf16", 128, 4, pooled=True),
        _attend("fp16", 128, 4, pooled=True, int8=True),
        _merge("bf16", 64, 8, MOST_SPLITS),
        _merge("bf16", 256, 8, MOST_SPLITS),
        _merge("fp16", 128, 4, 4),
        _merge("fp32", 128, 4, 16, mass=False),
        _merge("bf16", 64, 8, 16, sinks=True),
        _merge("bf16", 128, 7, 16, pooled=True),
    ]
    return found


def _attend(
    dtype: str,
    size: int,
    group: int,
    *,
    value_size: int | None = None,
    int8: bool = False,
    mass: bool = True,
    softcap: bool = False,
    sinks: bool = False,
    pooled: bool = False,
    one_split: bool = False,
) -> Case:
    value_size = size if value_size is None else value_size
    stored = "i8" if int8 else dtype
    tile = configuration(size, value_size, torch.int8 if int8 else DTYPES[dtype])
    pointers = {
        "p_query": dtype,
        "p_keys": stored,
        "p_values": stored,
        "p_lengths": "i32",
        "p_offsets": "i64" if pooled else None,
        "p_sinks": dtype if sinks else None,
        "p_key_scales": "fp32" if int8 else None,
        "p_value_scales": "fp32" if int8 else None,
        "p_mass": "fp32" if mass else None,
        "p_logits": "fp32" if mass else None,
        "p_output": dtype if one_split else "fp32",
        "p_log_sum_exp": "fp32",
    }
    constants = {
        **_common(group, value_size, tile.key_block, pooled),
        "SIZE": size,
        "SIZE_BLOCK": max(16, triton.next_power_of_2(size)),
        "SOFTCAP": softcap,
        "QUANTISED": int8,
        "ONE_SPLIT": one_split,
    }
    variant = [dtype, *(["int8"] if int8 else []), f"D{size}", f"G{group}"]
    variant += [f"Dv{value_size}"] if value_size != size else []
    variant += _named(softcap=softcap, sinks=sinks, pooled=pooled, one_split=one_split)
    variant += [] if mass else ["no mass"]
    return _case(
        attend_split,
        " ".join(variant),
        pointers,
        {"scaling": "fp32", "softcap": "fp32", **dict.fromkeys(INTEGERS, "i32")},
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        wide_loads=not one_split,
    )


def _merge(
    dtype: str,
    value_size: int,
    group: int,
    splits: int,
    *,
    mass: bool = True,
    sinks: bool = False,
    pooled: bool = False,
) -> Case:
    pointers = {
        "p_lengths": "i32",
        "p_offsets": "i64" if pooled else None,
        "p_sinks": dtype if sinks else None,
        "p_mass": "fp32" if mass else None,
        "p_logits": "fp32" if mass else None,
        "p_partial": "fp32",
        "p_partial_log_sum_exp": "fp32",
        "p_output": dtype,
        "p_log_sum_exp": "fp32",
    }
    key_block = configuration(value_size, value_size, DTYPES[dtype]).key_block
    constants = {
        **_common(group, value_size, key_block, pooled),
        "SPLITS_BLOCK": splits,
        "AT_ONCE": MERGED_AT_ONCE,
    }
    integers = [name for name in INTEGERS if name in merge_splits.arg_names]
    variant = [dtype, f"D{value_size}", f"G{group}", f"{splits} splits"]
    variant += _named(sinks=sinks, pooled=pooled)
    variant += [] if mass else ["no mass"]
    return _case(
        merge_splits,
        "merge " + " ".join(variant),
        pointers,
        dict.fromkeys(integers, "i32"),
        constants,
        num_warps=4,
        num_stages=1,
        wide_loads=False,
    )


def _common(group: int, value_size: int, key_block: int, pooled: bool) -> dict[str, Any]:
    return {
        "GROUP": group,
        "GROUP_BLOCK": triton.next_power_of_2(group),
        "VALUE_SIZE": value_size,
        "VALUE_BLOCK": max(16, triton.next_power_of_2(value_size)),
        "KEY_BLOCK": key_block,
        "POOLED": pooled,
    }


def _named(**options: bool) -> list[str]:
    return [name.replace("_", " ") for name, given in options.items() if given]


def _case(
    kernel: Any,
    variant: str,
    pointers: dict[str, str | None],
    others: dict[str, str],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int,
    wide_loads: bool,
) -> Case:
    given = {name: f"*{dtype}" for name, dtype in pointers.items() if dtype is not None}
    absent = {name: None for name, dtype in pointers.items() if dtype is None}
    types = {**given, **others}
    return Case(
        operation="decode_attention",
        variant=variant,
        kernel=kernel,
        signature={name: types[name] for name in kernel.arg_names if name in types},
        constants={**absent, **constants},
        divisible_by_16=(*given, *(name for name in ALIGNED_INTEGERS if name in others)),
        num_warps=num_warps,
        num_stages=num_stages,
        wide_loads=wide_loads,
    )

"""The configurations of replay attention that are compiled ahead of time, as a check.

The allocator aligns tensors to more than 16 bytes, and the head sizes here are multiples of 16, so
that pointers and strides of queries, keys and values are divisible by 16. Every row of keys is read
through an index, but a row's coordinates lie side by side, so these loads have to be wide.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..ahead_of_time import Case
from .periods import LONGEST
from .triton import attend, configuration, differentiate_keys, differentiate_queries

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_ALIGNED = ("query_", "key_", "value_", "grad_")


def cases() -> list[Case]:
    """All three kernels at the usual head sizes, and float32 and each feature where it costs most.
    float16 compiles as bfloat16 does."""
    return [
        _case(attend, "bf16", 64, 8, sinks=True),
        _case(attend, "bf16", 128, 4),
        _case(attend, "bf16", 256, 2, softcap=True),
        _case(attend, "fp32", 64, 3),
        _case(differentiate_queries, "bf16", 64, 8),
        _case(differentiate_queries, "bf16", 128, 4),
        _case(differentiate_queries, "bf16", 256, 2, softcap=True),
        _case(differentiate_queries, "fp32", 64, 3),
        _case(differentiate_keys, "bf16", 64, 8),
        _case(differentiate_keys, "bf16", 128, 4),
        _case(differentiate_keys, "bf16", 256, 2, softcap=True),
        _case(differentiate_keys, "fp32", 64, 3),
        _case(differentiate_keys, "fp32", 128, 4),
    ]


def _case(
    kernel: Any,
    dtype: str,
    size: int,
    group: int,
    *,
    sinks: bool = False,
    softcap: bool = False,
) -> Case:
    backward = kernel is not attend
    chosen = configuration(size, size, DTYPES[dtype], backward=backward)
    types = {
        "p_deaths": "*i32",
        "p_blocks": "*i32",
        "p_starts": "*i64",
        "p_counts": "*i32",
        "p_columns": "*i32",
        "p_spans": "*i32",
        "p_log_sum_exp": "*fp32",
        "p_delta": "*fp32",
        "scaling": "fp32",
        "softcap": "fp32",
    }
    signature: dict[str, str] = {}
    absent: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name.isupper():
            continue
        if name == "p_sinks" and not sinks:
            absent[name] = None
        else:
            default = f"*{dtype}" if name.startswith("p_") else "i32"
            signature[name] = types.get(name, default)
    constants = {
        "GROUP": group,
        "SIZE": size,
        "SIZE_BLOCK": size,
        "VALUE_SIZE": size,
        "VALUE_BLOCK": size,
        "QUERIES": chosen.queries,
        "KEYS": chosen.keys,
        "PARTS": triton.cdiv(LONGEST, chosen.queries),
        "SOFTCAP": softcap,
    }
    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    features = ["sinks"] * sinks + ["softcap"] * softcap
    return Case(
        operation="replay_attention",
        variant=" ".join([kernel.__name__, dtype, f"D{size}", f"G{group}", *features]),
        kernel=kernel,
        signature=signature,
        constants=absent | used,
        divisible_by_16=tuple(name for name in signature if name.startswith(("p_", *_ALIGNED))),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )

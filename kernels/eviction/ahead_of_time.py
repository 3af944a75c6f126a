"""The configurations of the eviction that the ahead-of-time gate compiles."""

from __future__ import annotations

from typing import Any

from ..ahead_of_time import Case
from . import triton as kernels

PLANNED = (640, 2048, 16384)
"""Tokens of a head: a usual budget with its interval, the end of one warp's reach, the most."""

MOVED_ROWS = {
    "D64 fp16": 128,
    "D80 fp16": 160,
    "D128 bf16": 256,
    "D256 fp16": 512,
    "D256 fp32": 1024,
    "D64 int8": 64,
    "float32 a token": 4,
}
"""Bytes of a row, by what it is."""


def cases() -> list[Case]:
    """Both plans at each size, and both ways of moving for each kind of row."""
    listed = []
    for stored in PLANNED:
        shape, warps = kernels.plan_shape(stored)
        for variant, kernel, constants in (
            ("holes", kernels.plan_hole_filling_kernel, {"RECORD": True, **shape}),
            (
                "holes, no record",
                kernels.plan_hole_filling_kernel,
                {"RECORD": False, **shape},
            ),
            ("compaction", kernels.plan_compaction_kernel, shape),
        ):
            listed.append(
                _case(
                    f"plan {variant} S{stored}",
                    kernel,
                    constants,
                    num_warps=warps,
                    in_place=kernel is kernels.plan_hole_filling_kernel,
                    forward=True,
                    # Every program reads a few KB of numbers whose count is known on the device
                    # only; neighbouring threads read neighbouring numbers.
                    wide_loads=False,
                )
            )
    for variant, row_bytes in MOVED_ROWS.items():
        word = min(row_bytes, 8)
        constants = {
            "WORD": kernels.WORD_TYPES[word],
            "ALIGNMENT": min(row_bytes, 16),
            "WORDS": row_bytes // word,
            **kernels.move_shape(row_bytes // word, word),
        }
        for name, kernel in (
            ("fill", kernels.fill_holes_kernel),
            ("compact", kernels.compact_kernel),
        ):
            listed.append(
                _case(
                    f"{name} {variant}",
                    kernel,
                    constants,
                    num_warps=4,
                    # Holes and the rows that fill them never overlap: no order is needed.
                    in_place=kernel is kernels.compact_kernel,
                    # A block of slots is only read by itself and by those before it.
                    forward=True,
                    wide_loads=row_bytes >= 16,
                )
            )
    return listed


_TABLES = ("p_positions", "p_order", "p_tensors")


def _case(variant: str, kernel: Any, constants: dict[str, Any], **more: Any) -> Case:
    signature = {}
    for name in kernel.arg_names:
        if name in _TABLES:
            signature[name] = "*i64"
        elif name == "p_scores":
            signature[name] = "*fp32"
        elif name in ("p_sources", "p_targets"):
            signature[name] = "*i16"
        elif name not in constants:
            signature[name] = "*i32" if name.startswith("p_") else "i32"
    pointers = tuple(name for name in signature if name.startswith("p_"))
    return Case("eviction", variant, kernel, signature, constants, pointers, num_stages=1, **more)

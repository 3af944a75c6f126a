"""Kernels with and without faults, for the tests of the gate. Read by it as a module of cases.

p_ pointer, b_ block value, o_ offsets, m_ mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparse_cache.kernels.ahead_of_time.case import Case


@triton.jit
def move_rows(
    p_rows, p_from, length, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, BARRIER: tl.constexpr
):
    """rows[i] = rows[from[i]] for i < length, tile by tile, where from[i] >= i."""
    o_size = tl.arange(0, SIZE)
    p_head = p_rows + tl.program_id(0).to(tl.int64) * stride
    for start in range(0, length, BLOCK):
        o_to = start + tl.arange(0, BLOCK)
        m_to = o_to < length
        o_from = tl.load(p_from + o_to, mask=m_to, other=0).to(tl.int64)
        b_rows = tl.load(p_head + o_from[:, None] * SIZE + o_size[None, :], mask=m_to[:, None])
        if BARRIER:
            tl.debug_barrier()
        p_to = p_head + o_to.to(tl.int64)[:, None] * SIZE + o_size[None, :]
        tl.store(p_to, b_rows, mask=m_to[:, None])
        if BARRIER:
            tl.debug_barrier()


@triton.jit
def move_rows_of_layers(p_table, p_from, length, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The same for all layers, whose addresses and strides stand in a table `[L, 4]`."""
    p_entry = p_table + tl.program_id(0) * 4
    p_rows = tl.load(p_entry).to(tl.pointer_type(tl.float16))
    p_rows = tl.multiple_of(p_rows, 16)
    stride = tl.multiple_of(tl.load(p_entry + 2), 16)
    p_rows += tl.program_id(1) * stride
    o_size = tl.arange(0, SIZE)
    for start in range(0, length, BLOCK):
        o_to = start + tl.arange(0, BLOCK)
        m_to = o_to < length
        o_from = tl.load(p_from + o_to, mask=m_to, other=0).to(tl.int64)
        b_rows = tl.load(p_rows + o_from[:, None] * SIZE + o_size[None, :], mask=m_to[:, None])
        tl.debug_barrier()
        p_to = p_rows + o_to.to(tl.int64)[:, None] * SIZE + o_size[None, :]
        tl.store(p_to, b_rows, mask=m_to[:, None])
        tl.debug_barrier()


@triton.jit
def multiply(p_left, p_right, p_out, count, SIZE: tl.constexpr, TILE: tl.constexpr):
    """out = sum of left[t] @ right[t] over tiles t < count."""
    o_row = tl.arange(0, SIZE)[:, None]
    o_column = tl.arange(0, SIZE)[None, :]
    b_out = tl.zeros([SIZE, SIZE], tl.float32)
    for tile in range(0, count):
        o_tile = tile.to(tl.int64) * SIZE * TILE
        o_inner = tl.arange(0, TILE)
        b_left = tl.load(p_left + o_tile + o_row * TILE + o_inner[None, :])
        b_right = tl.load(p_right + o_tile + o_inner[:, None] * SIZE + o_column)
        b_out += tl.dot(b_left, b_right)
    tl.store(p_out + o_row * SIZE + o_column, b_out)


@triton.jit
def normalise(p_in, p_out, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """out = in / sum(in): the whole block has to wait in registers for its sum."""
    o_all = tl.arange(0, ROWS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    b_in = tl.load(p_in + o_all)
    tl.store(p_out + o_all, b_in / tl.sum(tl.sum(b_in, 1), 0))


@triton.jit
def not_for_a_gpu(p_out, SIZE: tl.constexpr):
    """The interpreter runs it; the compiler refuses a size that is no power of two."""
    tl.store(p_out + tl.arange(0, SIZE), tl.zeros([SIZE], tl.float32))


def move_case(barrier: bool, variant: str, **changes: object) -> Case:
    """`move_rows` in bf16, with or without its barriers."""
    settings: dict = {
        "operation": "small",
        "variant": variant,
        "kernel": move_rows,
        "signature": {"p_rows": "*bf16", "p_from": "*i32", "length": "i32", "stride": "i64"},
        "constants": {"SIZE": 128, "BLOCK": 32, "BARRIER": barrier},
        "divisible_by_16": ("p_rows", "p_from", "stride"),
        "in_place": True,
    }
    return Case(**{**settings, **changes})


def table_case(variant: str = "table") -> Case:
    """`move_rows_of_layers` in fp16."""
    return Case(
        operation="small",
        variant=variant,
        kernel=move_rows_of_layers,
        signature={"p_table": "*i64", "p_from": "*i32", "length": "i32"},
        constants={"SIZE": 64, "BLOCK": 64},
        divisible_by_16=("p_table", "p_from"),
        in_place=True,
    )


def multiply_case(variant: str, size: int, tile: int, **changes: object) -> Case:
    """`multiply` in bf16."""
    settings: dict = {
        "operation": "small",
        "variant": variant,
        "kernel": multiply,
        "signature": {"p_left": "*bf16", "p_right": "*bf16", "p_out": "*fp32", "count": "i32"},
        "constants": {"SIZE": size, "TILE": tile},
        "divisible_by_16": ("p_left", "p_right", "p_out"),
    }
    return Case(**{**settings, **changes})


def good_cases() -> list[Case]:
    """Nothing is wrong with these."""
    return [
        move_case(True, "barrier"),
        move_case(True, "barrier, one warp", num_warps=1),
        table_case(),
        multiply_case("64x64", 64, 64, num_stages=3),
        move_case(
            False,
            "loads that need not be wide",
            in_place=False,
            divisible_by_16=(),
            wide_loads=False,
        ),
    ]


def bad_cases() -> dict[str, Case]:
    """One fault each, by a part of the sentence that the gate must say."""
    return {
        "no barrier separates": move_case(False, "no barrier"),
        "not vectorised": move_case(True, "scalar loads", divisible_by_16=(), in_place=False),
        "it spills": Case(
            "small",
            "spills",
            normalise,
            {"p_in": "*fp32", "p_out": "*fp32"},
            {"ROWS": 128, "SIZE": 128},
            ("p_in", "p_out"),
            options={"maxnreg": 64},
        ),
        "bytes of shared memory a block; sm_": multiply_case(
            "shared", 128, 128, num_stages=5, num_warps=8
        ),
        "does not compile": Case(
            "small", "size 48", not_for_a_gpu, {"p_out": "*fp32"}, {"SIZE": 48}
        ),
        "argument 'BARRIER' must be": move_case(
            True, "constant missing", constants={"SIZE": 128, "BLOCK": 32}
        ),
        "argument 'rows' must be": move_case(
            True,
            "unknown argument",
            signature={"rows": "*bf16", "p_from": "*i32", "length": "i32", "stride": "i64"},
        ),
        "is declared divisible by 16, but": move_case(
            True, "hint on a constant", divisible_by_16=("p_rows", "SIZE")
        ),
        "no tensor is both loaded and stored": multiply_case("not in place", 64, 64, in_place=True),
    }

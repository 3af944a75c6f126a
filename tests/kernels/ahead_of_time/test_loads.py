"""Which loads count as bulk loads, and how wide they are, on text written by hand."""

from __future__ import annotations

import pytest

from sparse_cache.kernels.ahead_of_time.loads import look_at_loads
from sparse_cache.kernels.ahead_of_time.ptx import Program

PTX = """
.visible .entry read(.param .u64 read_param_0)
.reqntid 128
{{
    ld.param.b64 %rd1, [read_param_0];
    .loc 1 7 20
    // begin inline asm
    .loc 1 8 20
    {load}
    // end inline asm
    ret;
}}
    .file 1 "/somewhere/kernel.py"
"""
TTGIR = """
  %b = tt.load %p, %m, %o : tensor<{shape}x!tt.ptr<{element}>, #blocked> loc(#loc9)
#loc5 = loc("/somewhere/kernel.py":7:20)
#loc6 = loc("/somewhere/kernel.py":30:4)
#loc9 = loc("b"(#loc8))
#loc8 = loc(callsite(#loc5 at #loc6))
"""


def look(load: str, shape: str = "32x128", element: str = "bf16"):
    program = Program(PTX.format(load=load))
    return look_at_loads(TTGIR.format(shape=shape, element=element), program, 128)


@pytest.mark.parametrize(
    ("load", "width"),
    [
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 16),
        ("ld.global.L1::evict_first.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];", 8),
        ("ld.global.nc.b128 %rq1, [ %rd1 + 0 ];", 16),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", 16),
        ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 8;", 8),
    ],
)
def test_wide(load: str, width: int) -> None:
    found = look(load)
    assert (found.widest, found.vectorised) == (width, 1.0)
    assert (found.bulk[0].line, found.bulk[0].bytes) == (7, 32 * 128 * 2)


@pytest.mark.parametrize(
    "load",
    [
        "ld.global.b16 { %rs1 }, [ %rd1 + 0 ];",
        "@!%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];",
        "cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4;",
    ],
)
def test_narrow(load: str) -> None:
    assert look(load).vectorised == 0.0


def test_a_bulk_load_that_is_not_found_is_not_vectorised() -> None:
    found = look("mov.u32 %r1, 0;")
    assert (found.widest, found.vectorised) == (0, 0.0)


@pytest.mark.parametrize(
    ("shape", "element", "bulk"),
    [
        ("32x128", "i8", True),
        ("8x64", "bf16", True),
        ("4x64", "bf16", False),
        ("1024", "f32", False),
        ("1x1024", "f32", False),
        ("1024", "f16", True),
        ("16x128", "f32", True),
    ],
)
def test_what_is_a_bulk_load(shape: str, element: str, bulk: bool) -> None:
    assert bool(look("ld.global.b16 %rs1, [ %rd1 + 0 ];", shape, element).bulk) == bulk

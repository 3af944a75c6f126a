"""The check of loads, barriers and stores, on PTX written by hand."""

from __future__ import annotations

import pytest

from sparse_cache.kernels.ahead_of_time.order import order_faults, without_barriers
from sparse_cache.kernels.ahead_of_time.ptx import Program

HEAD = """
.visible .entry move(
    .param .u64 .ptr .global .align 1 move_param_0,
    .param .u64 .ptr .global .align 1 move_param_1
)
.reqntid {threads}
{{
    .reg .b32 %r<9>;
    ld.param.b64 %rd1, [move_param_0];
    ld.param.b64 %rd2, [move_param_1];
    mov.u32 %r1, %tid.x;
    mad.wide.s32 %rd3, %r1, 4, %rd1;
"""
LOAD = "ld.global.b32 %r2, [%rd3];"
OTHER_LOAD = "ld.global.b32 %r3, [%rd2+4];"
BARRIER = "bar.sync 0;"
STORE = "@%p1 st.global.b32 [ %rd3 + 0 ], { %r2 };"
NAMES = {"move_param_0": "rows", "move_param_1": "index"}


def faults(*lines: str, threads: int = 128, forward: bool = False) -> list[str]:
    text = HEAD.format(threads=threads) + "\n".join(lines) + "\nret;\n}\n"
    return order_faults(Program(text), NAMES, forward=forward)


def in_a_loop(*lines: str) -> tuple[str, ...]:
    return ("$L_start:", *lines, "setp.lt.s32 %p2, %r3, %r1;", "@%p2 bra $L_start;")


def test_a_barrier_between_load_and_store() -> None:
    assert faults(LOAD, BARRIER, STORE) == []


def test_no_barrier() -> None:
    (fault,) = faults(LOAD, STORE)
    assert "no barrier separates the load of rows" in fault


def test_a_barrier_after_the_store_is_too_late() -> None:
    assert faults(LOAD, STORE, BARRIER)


def test_store_then_load() -> None:
    (fault,) = faults(STORE, LOAD)
    assert "the store of rows" in fault
    assert faults(STORE, BARRIER, LOAD) == []


def test_a_loop_needs_both_barriers_unless_it_only_reads_ahead() -> None:
    one = in_a_loop(LOAD, BARRIER, STORE)
    assert any("the store of rows" in fault for fault in faults(*one))
    assert faults(*one, forward=True) == []
    assert faults(*in_a_loop(LOAD, BARRIER, STORE, BARRIER)) == []


def test_reading_ahead_excuses_no_missing_barrier_inside_of_a_tile() -> None:
    assert faults(*in_a_loop(LOAD, STORE), forward=True)
    assert faults(*in_a_loop(BARRIER, STORE, LOAD), forward=True)
    # A load that was moved to the end of the loop meets the next iteration's store.
    assert faults(*in_a_loop(STORE, BARRIER, LOAD), forward=True)


@pytest.mark.parametrize(
    "barrier", ["@%p1 bar.sync 0;", "bar.sync 1, 64;", "bar.warp.sync -1;", "bar.arrive 0, 128;"]
)
def test_what_does_not_stop_all_threads_is_no_barrier(barrier: str) -> None:
    assert faults(LOAD, barrier, STORE)


def test_one_warp_waits_by_its_own_instruction() -> None:
    assert faults(LOAD, "bar.warp.sync 0xffffffff;", STORE, threads=32) == []


def test_a_barrier_on_one_of_two_paths_is_not_enough() -> None:
    branch = ("@%p1 bra $L_end;", BARRIER, "$L_end:")
    assert faults(LOAD, *branch, STORE)
    assert faults(LOAD, *branch, BARRIER, STORE) == []


def test_another_tensor_does_not_count() -> None:
    assert faults(LOAD, BARRIER, OTHER_LOAD, STORE) == []


def test_pointers_from_a_table_are_told_from_the_table() -> None:
    entry = ("ld.global.b64 %rd5, [%rd2];", "add.s64 %rd6, %rd5, 16;")
    load, store = "ld.global.b32 %r4, [%rd6];", "st.global.b32 [%rd5], %r4;"
    assert faults(*entry, load, BARRIER, store) == []
    (fault,) = faults(*entry, load, store)
    assert "a tensor of the table index" in fault


def test_a_pointer_that_went_through_shared_memory() -> None:
    moved = ("st.shared.b64 [%r7], %rd3;", BARRIER, "ld.shared.b64 %rd7, [%r8];")
    assert faults(*moved, "ld.global.b32 %r2, [%rd7];", STORE)
    assert faults(*moved, "ld.global.b32 %r2, [%rd7];", BARRIER, STORE) == []


def test_background_loads_unknown_addresses_and_calls_are_refused() -> None:
    (fault,) = faults("cp.async.cg.shared.global [%r5], [%rd3], 0x10;", BARRIER, STORE)
    assert "in the background" in fault
    assert any("cannot tell" in fault for fault in faults("ld.global.b32 %r2, [%rd8];", STORE))
    assert any("calls a function" in fault for fault in faults("call.uni helper, ();"))
    assert faults("brx.idx %r1, $L_table;") == [
        "the kernel has a computed jump, which the check cannot follow."
    ]


def test_nothing_to_check_is_a_fault() -> None:
    assert faults(LOAD) == ["it is declared in place, but no tensor is both loaded and stored."]


def test_the_control_removes_every_barrier() -> None:
    text = HEAD.format(threads=128) + f"{LOAD}\n  {BARRIER}\n{STORE}\nret;\n}}\n"
    assert order_faults(Program(text), NAMES) == []
    assert order_faults(Program(without_barriers(text)), NAMES)

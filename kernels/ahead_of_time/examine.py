"""Judge one compiled kernel: its figures, and what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .build import Build, build
from .case import Case
from .loads import look_at_loads
from .order import order_faults, without_barriers
from .ptx import Program

# Shared memory that one block can have, in bytes, and registers of a multiprocessor: table
# "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide,
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTERS_OF_A_THREAD = 255
REGISTERS_OF_A_BLOCK = 64 * 1024
# https://docs.nvidia.com/cuda/parallel-thread-execution/#tensor-memory
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Examined:
    """A kernel in one configuration on one GPU."""

    operation: str
    variant: str
    kernel: str
    target: int
    faults: tuple[str, ...]
    """One sentence each."""
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    widest_load: int = 0
    """Bytes of the widest load instruction."""
    vectorised: float | None = None
    """Share of the bulk loads' bytes that comes through wide instructions; None without any."""
    order: str | None = None
    """Of loads, barriers and stores: "right" or "wrong"; None if not checked."""
    seconds: float = 0.0
    """Processor time of the compilation, without that of the negative control."""

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def examine(case: Case, target: int, *, control: bool = True) -> Examined:
    """Compile `case` for sm_`target` and judge what came out.

    Args:
        case: what to compile.
        target: ten times the compute capability.
        control: whether a kernel in place is also compiled without its barriers, to see that the
            check of the order finds that wrong.

    A kernel that does not compile is a fault too, so nothing is raised for it.
    """
    name = getattr(case.kernel, "__name__", str(case.kernel))
    try:
        made = build(case, target)
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        fault = f"it does not compile: {type(error).__name__}: {reason}"
        return Examined(case.operation, case.variant, name, target, (fault,))
    program = Program(made.ptx)
    threads = 32 * case.num_warps
    loads = look_at_loads(made.ttgir, program, program.threads or threads)
    faults = _resource_faults(made, target, program.threads or threads)
    if case.wide_loads:
        faults += [
            f"line {load.line} loads {load.bytes} bytes with "
            + (
                f"instructions of {min(load.widths)} bytes a thread, not vectorised."
                if load.widths
                else "instructions that cannot be found in the PTX."
            )
            for load in loads.bulk
            if load.vectorised < 1
        ]
    order = None
    if case.in_place:
        wrong = order_faults(program, made.parameters, forward=case.forward)
        wrong += _control_faults(case, target, made, control)
        order = "wrong" if wrong else "right"
        faults += wrong
    return Examined(
        operation=case.operation,
        variant=case.variant,
        kernel=name,
        target=target,
        faults=tuple(faults),
        registers=made.registers,
        stack_bytes=made.stack_bytes,
        shared_bytes=made.shared_bytes,
        widest_load=loads.widest,
        vectorised=loads.vectorised,
        order=order,
        seconds=made.seconds,
    )


def _resource_faults(made: Build, target: int, threads: int) -> list[str]:
    faults = []
    if made.stack_bytes:
        faults.append(
            f"it spills: {made.stack_bytes} bytes of stack a thread beside "
            f"{made.registers} registers."
        )
    if made.registers > REGISTERS_OF_A_THREAD:
        faults.append(f"it needs {made.registers} registers a thread; there are 255.")
    if made.registers * threads > REGISTERS_OF_A_BLOCK:
        faults.append(
            f"{threads} threads of {made.registers} registers do not fit into the "
            f"{REGISTERS_OF_A_BLOCK} of a multiprocessor."
        )
    if made.shared_bytes > SHARED_BYTES[target]:
        faults.append(
            f"it needs {made.shared_bytes} bytes of shared memory a block; sm_{target} has "
            f"{SHARED_BYTES[target]}."
        )
    if made.tensor_memory_columns > TENSOR_MEMORY_COLUMNS:
        faults.append(
            f"it needs {made.tensor_memory_columns} columns of tensor memory; there are "
            f"{TENSOR_MEMORY_COLUMNS}."
        )
    return faults


def _control_faults(case: Case, target: int, made: Build, compiled: bool) -> list[str]:
    """Whether the check of the order would notice missing barriers in this very kernel."""
    bare_text = Program(without_barriers(made.ptx))
    if not order_faults(bare_text, made.parameters, forward=case.forward):
        return ["with all barriers taken out of its PTX the check of the order finds nothing."]
    if not compiled:
        return []
    bare = build(case, target, barriers=False)
    program = Program(bare.ptx)
    if order_faults(program, bare.parameters, forward=case.forward):
        return []
    # Reductions and changes of layout bring barriers of their own, which may stand where the
    # kernel's do; taken out as well, above, they were missed.
    if not any(program.is_barrier(each) for each in program.instructions):
        return ["compiled without barriers it passes the check of the order too."]
    return []

"""Compile one kernel for one GPU, without a GPU."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..launch import COMPILER_OPTIONS
from .case import Case


@dataclass(frozen=True)
class Build:
    """What the compiler made."""

    ptx: str
    """Assembly text."""
    ttgir: str
    """Triton's last form of the kernel that still knows tensors."""
    parameters: dict[str, str]
    """The kernel's name of each pointer argument, by its name in the PTX."""
    registers: int
    """Registers of a thread."""
    stack_bytes: int
    """Memory of a thread for what did not fit into registers."""
    shared_bytes: int
    """Shared memory of a block, both that of the machine code and what the launch asks for."""
    tensor_memory_columns: int
    """Columns of tensor memory, which only some GPUs have."""
    seconds: float
    """Processor time of the compilation, that of the assembler included."""


def build(case: Case, target: int, *, barriers: bool = True) -> Build:
    """Compile `case` for the GPUs of compute capability `target`, such as 90 for sm_90.

    Args:
        case: what to compile.
        target: ten times the compute capability.
        barriers: False leaves out every `tl.debug_barrier`: a wrong kernel, to see that the check
            of the order finds it.

    Raises:
        ValueError: the case does not fit its kernel, in one sentence.
        Exception: whatever Triton raises on a kernel that does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = _checked_arguments(case)
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    source = ASTSource(case.kernel, signature, dict(case.constants), attributes)
    options = {
        **COMPILER_OPTIONS,
        **case.options,
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
    }
    start = _processor_seconds()
    # On an error of the assembler Triton prints the whole program.
    silence = contextlib.redirect_stdout(io.StringIO())
    with silence, contextlib.nullcontext() if barriers else _no_barriers():
        made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    seconds = _processor_seconds() - start
    ptx = made.asm["ptx"]
    entry = re.search(r"\.entry\s+([\w$]+)", ptx)
    kernel = entry.group(1) if entry else made.metadata.name
    passed = [name for name in names if name in case.signature]
    used = _resources(made.asm["cubin"])
    return Build(
        ptx=ptx,
        ttgir=str(made.asm["ttgir"]),
        parameters={
            f"{kernel}_param_{number}": name
            for number, name in enumerate(passed)
            if case.signature[name].startswith("*")
        },
        registers=used["REG"],
        stack_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=made.metadata.shared + _static_shared_bytes(used["SHARED"], target),
        tensor_memory_columns=getattr(made.metadata, "tmem_size", 0) or 0,
        seconds=seconds,
    )


def _checked_arguments(case: Case) -> list[str]:
    """The kernel's argument names, after a look at whether the case describes each of them."""
    if not hasattr(case.kernel, "arg_names") or not hasattr(case.kernel, "cache_key"):
        raise ValueError(
            f"{getattr(case.kernel, '__name__', case.kernel)!r} is not a compilable triton.jit "
            "function (with TRITON_INTERPRET=1 none is)."
        )
    names = list(case.kernel.arg_names)
    described = [*case.signature, *case.constants]
    for name in sorted({*names, *described}, key=lambda each: (each in names, each)):
        if described.count(name) != 1 or name not in names:
            raise ValueError(
                f"argument {name!r} must be one of the kernel's and stand once, in signature or "
                f"in constants; the kernel has {', '.join(names)}."
            )
    never_specialised = {
        each.name
        for each in case.kernel.params
        if each.do_not_specialize or each.do_not_specialize_on_alignment
    }
    for each in case.kernel.params:
        if each.is_constexpr and each.name not in case.constants:
            raise ValueError(f"argument {each.name!r} is a tl.constexpr, so constants needs it.")
    for name in case.divisible_by_16:
        if name not in case.signature or name in never_specialised:
            raise ValueError(
                f"argument {name!r} is declared divisible by 16, but a launch never tells the "
                "compiler so: it is constant, unknown or not specialised."
            )
    return names


def _processor_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _resources(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in text.splitlines() if "REG:" in line)
    found = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)}
    return {name: found.get(name, 0) for name in ("REG", "STACK", "SHARED", "LOCAL")}


def _static_shared_bytes(reported: int, target: int) -> int:
    """Without the KiB that the system keeps of every block, which newer GPUs' code reports."""
    return max(0, reported - 1024) if target >= 90 else reported


@contextlib.contextmanager
def _no_barriers() -> Iterator[None]:
    from triton.language.semantic import TritonSemantic

    kept = TritonSemantic.debug_barrier
    TritonSemantic.debug_barrier = lambda self: None
    try:
        yield
    finally:
        TritonSemantic.debug_barrier = kept

"""Examine all cases for all targets, in several processes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from tqdm import tqdm

from .examine import Examined, examine
from .operations import cases_of, kernels_without_case


@dataclass(frozen=True)
class Verdict:
    """What the gate found."""

    examined: tuple[Examined, ...]
    faults: tuple[str, ...]
    """One sentence each; empty if everything is well."""
    seconds: float
    triton: str
    """Triton's version."""


def run_gate(operations: Sequence[str], targets: Sequence[int], processes: int = 2) -> Verdict:
    """Compile every case of `operations` for every target, from nothing, and judge all.

    Args:
        operations: see `cases_of`.
        targets: ten times the compute capability of each, such as 90 for sm_90.
        processes: how many compile at a time.
    """
    start = time.perf_counter()
    examined: list[tuple[int, int, int, Examined]] = []
    faults: list[str] = []
    version = ""
    with tempfile.TemporaryDirectory() as folder:
        # Spawned processes with this environment: a Triton that was imported here may have been
        # set to interpret, or to reuse what it compiled long ago.
        changed = {"TRITON_CACHE_DIR": folder, "TRITON_ALWAYS_COMPILE": "1"}
        kept = {name: os.environ.pop(name, None) for name in (*changed, "TRITON_INTERPRET")}
        os.environ.update(changed)
        try:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(processes, mp_context=context) as pool:
                found = {pool.submit(_count, operation): operation for operation in operations}
                waiting: dict[Future[Examined], tuple[int, int, int]] = {}
                for counted in as_completed(found):
                    operation = found[counted]
                    count, problems, version = counted.result()
                    faults += [f"{operation}: {problem}" for problem in problems]
                    for number in range(count):
                        for target in targets:
                            key = (operations.index(operation), number, target)
                            # Whether the check notices missing barriers does not depend on the
                            # GPU, and costs a build.
                            control = target == targets[0]
                            job = pool.submit(_examine, operation, number, target, control)
                            waiting[job] = key
                finished = as_completed(waiting)
                # disable=None: no bar where nobody watches.
                for done in tqdm(finished, total=len(waiting), unit="build", disable=None):
                    examined.append((*waiting[done], done.result()))
        finally:
            for name, value in kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
    ordered = [entry[3] for entry in sorted(examined, key=lambda entry: entry[:3])]
    for each in ordered:
        where = f"{each.operation}, {each.variant} ({each.kernel}), sm_{each.target}"
        faults += [f"{where}: {fault}" for fault in each.faults]
    return Verdict(tuple(ordered), tuple(faults), time.perf_counter() - start, version)


@functools.cache
def _cases(operation: str) -> list:
    return cases_of(operation)


def _count(operation: str) -> tuple[int, list[str], str]:
    import triton

    try:
        cases = _cases(operation)
    except Exception as error:
        return 0, [f"its cases cannot be read: {type(error).__name__}: {error}"], triton.__version__
    problems = [
        f"no case compiles the kernel {name}." for name in kernels_without_case(operation, cases)
    ]
    names = [(case.variant, case.kernel.__name__) for case in cases]
    problems += [
        f"two cases are called {variant!r} ({kernel})."
        for variant, kernel in sorted({name for name in names if names.count(name) > 1})
    ]
    return len(cases), problems, triton.__version__


def _examine(operation: str, number: int, target: int, control: bool) -> Examined:
    return examine(_cases(operation)[number], target, control=control)

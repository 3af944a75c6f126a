"""The one place from which kernels are launched, and where launches are counted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

COMPILER_OPTIONS = {"enable_fp_fusion": True}
"""What every kernel is compiled with, in a launch and ahead of time. Asked for by name: Triton's
default differs between its versions, and follows the environment in some."""

_counts = threading.local()


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, /, *args: Any, **kw: Any
) -> None:
    """Run a Triton kernel over `grid` on `device`.

    Args:
        kernel: the function made by `triton.jit`.
        grid: programs along each axis; nothing is launched if one is 0.
        device: where the tensors lie; Triton would otherwise take the current device.
        args, kw: the kernel's own arguments, and `num_warps`, `num_stages`.
    """
    if 0 in grid:
        return
    counted = getattr(_counts, "names", None)
    with contextlib.ExitStack() as contexts:
        if device.type == "cuda":
            contexts.enter_context(torch.cuda.device(device))
        if counted is not None:
            counted.append(kernel.__name__)
            # So that a profile tells the kernel from what the interpreter does for it.
            contexts.enter_context(torch.profiler.record_function(kernel.__name__))
        kernel[grid](*args, **COMPILER_OPTIONS, **kw)


@contextlib.contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Names of the kernels that this thread launches inside of the context, in order."""
    before = getattr(_counts, "names", None)
    _counts.names = []
    try:
        yield _counts.names
    finally:
        _counts.names = before

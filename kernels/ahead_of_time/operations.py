"""Find what there is to compile."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from .case import Case

_KERNELS = Path(__file__).parents[1]
# "sparse_cache.kernels", without naming the package that the folder is installed in.
_PACKAGE = __package__.rpartition(".")[0]


def operations() -> list[str]:
    """Folders under `kernels/` that have Triton kernels or cases of them, in order of name."""
    files = [*_KERNELS.glob("*/triton.py"), *_KERNELS.glob("*/ahead_of_time.py")]
    return sorted({file.parent.name for file in files})


def cases_of(operation: str) -> list[Case]:
    """The configurations of an operation that are shipped.

    Args:
        operation: a folder under `kernels/`, or the dotted name of any module with a function
            `cases()`.

    Raises:
        ValueError: there are none.
    """
    if "." in operation:
        name = operation
    elif (_KERNELS / operation / "ahead_of_time.py").is_file():
        name = f"{_PACKAGE}.{operation}.ahead_of_time"
    elif (_KERNELS / operation).is_dir():
        raise ValueError(f"kernels/{operation}/ahead_of_time.py is missing: nothing is compiled.")
    else:
        raise ValueError(
            f"operation {operation!r} is unknown; kernels/ has {', '.join(operations())}."
        )
    cases: list[Case] = importlib.import_module(name).cases()
    if not cases:
        raise ValueError(f"{name}.cases() is empty: nothing is compiled.")
    return cases


def kernels_without_case(operation: str, cases: list[Case]) -> list[str]:
    """Kernels of `kernels/<operation>/triton.py` that no case compiles, directly or by a call."""
    if "." in operation or not (_KERNELS / operation / "triton.py").is_file():
        return []
    from triton.runtime.jit import JITFunction

    module = importlib.import_module(f"{_PACKAGE}.{operation}.triton")
    own: dict[str, Any] = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.__module__ == module.__name__
    }
    reached: set[str] = set()
    waiting = [case.kernel for case in cases]
    while waiting:
        kernel = waiting.pop()
        for name, value in own.items():
            if name in reached:
                continue
            if value is kernel or re.search(rf"\b{name}\(", getattr(kernel, "src", "")):
                reached.add(name)
                waiting.append(value)
    return sorted(own.keys() - reached)

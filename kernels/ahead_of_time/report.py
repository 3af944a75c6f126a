"""The gate's findings as a table, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .examine import SHARED_BYTES, Examined
from .gate import Verdict

_HEADER = (
    "operation",
    "kernel",
    "configuration",
    "GPU",
    "registers",
    "stack",
    "shared",
    "widest load",
    "vectorised",
    "order",
)


def table(verdict: Verdict) -> str:
    """A plain table with the compile times, for the terminal."""
    rows = [(*_row(each), f"{each.seconds:.2f} s") for each in verdict.examined]
    lines = [(*_HEADER, "compiled in"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([padded[0], "-" * sum(widths, 2 * len(widths) - 2), *padded[1:]])


def markdown(verdict: Verdict) -> str:
    """The document, without times, so that it changes only when the kernels or Triton do."""
    limits = ", ".join(f"{size // 1024} KiB on sm_{gpu}" for gpu, size in SHARED_BYTES.items())
    lines = [
        "# Compiled kernels",
        "",
        "Written by `make kernels`, which compiles every kernel in every configuration that is",
        "shipped, on a machine without a GPU, and fails where one of these does not hold:",
        "",
        "- **stack**: no registers spill, so no thread needs a stack (bytes);",
        f"- **shared**: a block's shared memory fits ({limits});",
        "- **vectorised**: share of the bytes of bulk loads (at least 8 bytes a thread, of rows of",
        "  a tensor or of elements below 4 bytes) that comes through instructions of 8 bytes or",
        "  more; all of them, except in the configurations that say why not; `-`: no bulk loads;",
        "- **order**: where a kernel moves data inside one tensor, a barrier stands on every path",
        "  between a load and a store. `right` says that it does, and that the same kernel without",
        "  its barriers was found wrong.",
        "",
        f"{len(verdict.examined)} builds, Triton {verdict.triton}, {len(verdict.faults)} faults.",
        "",
        "| " + " | ".join(_HEADER) + " |",
        "|" + "---|" * len(_HEADER),
    ]
    lines += ["| " + " | ".join(_row(each)) + " |" for each in verdict.examined]
    if verdict.faults:
        lines += ["", "## Faults", "", *(f"- {fault}" for fault in verdict.faults)]
    return "\n".join(lines) + "\n"


def as_json(verdict: Verdict) -> str:
    """Everything, times included."""
    content = {
        "triton": verdict.triton,
        "seconds": round(verdict.seconds, 1),
        "faults": verdict.faults,
        "builds": [each.as_dict() for each in verdict.examined],
    }
    return json.dumps(content, indent=1) + "\n"


def _row(each: Examined) -> Sequence[str]:
    if not each.registers:
        figures = ["does not compile", *["-"] * 5]
    else:
        share = "-" if each.vectorised is None else f"{each.vectorised:.0%}"
        figures = [
            str(each.registers),
            str(each.stack_bytes),
            str(each.shared_bytes),
            f"{each.widest_load} bytes" if each.widest_load else "-",
            share,
            each.order or "-",
        ]
    return (each.operation, each.kernel, each.variant, f"sm_{each.target}", *figures)

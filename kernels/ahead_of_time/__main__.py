"""Compile every kernel for sm_80, sm_90 and sm_100, on any machine, and fail on waste.

python -m sparse_cache.kernels.ahead_of_time --out docs/kernels.md
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .examine import SHARED_BYTES
from .gate import run_gate
from .operations import operations
from .report import as_json, markdown, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the gate; returns 0 if there are no faults, 1 if there are."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_cache.kernels.ahead_of_time", description=__doc__
    )
    parser.add_argument(
        "--operations",
        nargs="+",
        default=None,
        help="folders under kernels/, or dotted names of modules with cases(); default: all",
    )
    parser.add_argument(
        "--targets", nargs="+", type=int, default=list(SHARED_BYTES), choices=SHARED_BYTES
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=None, help="the document, as Markdown")
    parser.add_argument("--json", type=Path, default=None, help="the figures, as JSON")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("the package triton is not installed (pip install triton).", file=sys.stderr)
        return 1
    verdict = run_gate(options.operations or operations(), options.targets, options.processes)
    print(table(verdict))
    for path, write in ((options.out, markdown), (options.json, as_json)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(write(verdict))
    processor = sum(each.seconds for each in verdict.examined)
    print(
        f"\n{len(verdict.examined)} builds in {verdict.seconds:.0f} s, of the compiler's "
        f"{processor:.0f} s of processor time; Triton {verdict.triton}."
    )
    for fault in verdict.faults:
        print(f"FAULT {fault}")
    if not verdict.examined:
        print("FAULT nothing was compiled.")
    return 1 if verdict.faults or not verdict.examined else 0


if __name__ == "__main__":
    sys.exit(main())

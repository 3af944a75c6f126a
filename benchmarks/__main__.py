"""Run every part, each in its own process, and then write the documents and pictures.

python -m benchmarks            # all figures, about two hours on two cores
python -m benchmarks --quick    # a smoke run, about a minute
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .reporting import RESULTS

PARTS = (
    "nochange",
    "decode",
    "soak",
    "quality",
    "kernels",
    "allocation",
    "quantization",
    "replay",
    "replay_cost",
)
"""One process each: the memory that one part took must not colour what the next one measures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; returns 0 when all of them ran."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=None, help="folder for the documents")
    parser.add_argument("--note", default=None, help="a remark to keep beside the figures")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; parts are {', '.join(PARTS)}.")
    shared = ["--model", options.model, "--output", str(options.output)]
    shared += ["--quick"] if options.quick else []
    shared += ["--threads", str(options.threads)] if options.threads else []
    shared += ["--note", options.note] if options.note else []
    failed = [part for part in options.parts or PARTS if not _run(part, shared, options.quick)]
    # A smoke run's figures mean nothing, so it writes documents only where it is told to.
    if options.docs or not options.quick:
        documents = ["--results", str(options.output)]
        documents += ["--docs", str(options.docs)] if options.docs else []
        if not _run("documents", documents, options.quick):
            failed.append("documents")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(part: str, arguments: list[str], in_this_process: bool) -> bool:
    """Whether the part ran. A smoke run stays in one process: importing takes most of its time."""
    print(f"\n== {part}", flush=True)
    start = time.perf_counter()
    if in_this_process:
        importlib.import_module(f"benchmarks.{part}").main(arguments)
        good = True
    else:
        command = [sys.executable, "-m", f"benchmarks.{part}", *arguments]
        good = subprocess.run(command).returncode == 0
    print(f"{part} took {time.perf_counter() - start:.0f} s", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())

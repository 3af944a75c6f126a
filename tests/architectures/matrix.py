"""Check every causal-LM type of transformers and write the table of results.

    python -m tests.architectures.matrix                      all types, writes docs/architectures.*
    python -m tests.architectures.matrix --types llama,jamba  some types, prints only

Each type runs in a forked process of its own with a time limit, so a crash or a hang costs one row
of the table and not the run.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

from .build import causal_lm_types
from .checks import FAULT, check_type
from .report import summary_line, write_report

REPOSITORY = Path(__file__).resolve().parents[2]


def run_one(model_type: str, connection: Connection) -> None:
    """Check one type in this process and send the report."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  models print warnings of their own
    sys.stderr = sys.stdout
    start = time.monotonic()
    report = check_type(model_type)
    report.seconds = round(time.monotonic() - start, 2)
    connection.send(report.as_json())
    connection.close()


def failed_run(model_type: str, reason: str, seconds: float) -> dict[str, Any]:
    """The report of a type whose process did not answer."""
    return {
        "model_type": model_type,
        "model_class": "",
        "result": FAULT,
        "reason": reason,
        "dense": "",
        "layers": "",
        "policies": [],
        "refused_policies": {},
        "checks": {},
        "notes": "",
        "seconds": round(seconds, 2),
    }


def run_all(types: list[str], processes: int, limit: float) -> list[dict[str, Any]]:
    """Check the types, `processes` at a time, each within `limit` seconds."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(types))
    running: dict[str, tuple[Any, Connection, float]] = {}
    reports: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < processes:
            model_type = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=run_one, args=(model_type, theirs), daemon=True)
            process.start()
            theirs.close()
            running[model_type] = (process, ours, time.monotonic())
        time.sleep(0.01)
        for model_type, (process, connection, start) in list(running.items()):
            seconds = time.monotonic() - start
            if connection.poll():
                try:
                    reports[model_type] = connection.recv()
                except EOFError:
                    process.join()
                    reports[model_type] = failed_run(
                        model_type, f"the process ended with code {process.exitcode}", seconds
                    )
            elif seconds > limit:
                process.kill()
                reports[model_type] = failed_run(model_type, f"not done in {limit:g} s", seconds)
            else:
                continue
            process.join()
            del running[model_type]
            elapsed = time.monotonic() - started
            line = summary_line(reports[model_type])
            print(f"[{len(reports)}/{len(types)} {elapsed:4.0f}s] {line}", flush=True)
    return [reports[model_type] for model_type in types]


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns 1 when a type has a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", help="comma-separated model types; by default all")
    parser.add_argument("--out", type=Path, help="the table to write; JSON goes next to it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one type")
    options = parser.parse_args(arguments)
    types = options.types.split(",") if options.types else causal_lm_types()
    out = options.out or (None if options.types else REPOSITORY / "docs" / "architectures.md")
    torch.set_num_threads(1)
    reports = run_all(types, options.processes, options.limit)
    if out is not None:
        write_report(reports, out)
        out.with_suffix(".json").write_text(json.dumps(reports, indent=1) + "\n")
    faults = [report for report in reports if report["result"] == FAULT]
    counts: dict[str, int] = {}
    for report in reports:
        counts[report["result"]] = counts.get(report["result"], 0) + 1
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

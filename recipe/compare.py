"""All methods from one warm start, or one model, beside each other: runs, a table and curves.

    python -m sparse_cache.recipe.compare --preset tiny
    python -m sparse_cache.recipe.compare --preset tiny --seeds 0 1 2 --methods dense smd
    python -m sparse_cache.recipe.compare --preset mixed --methods smd \\
        --vary aggregation sequence token constant

Every run is a `sparse_cache.recipe.train` of its own; one that has ended is not repeated, and one
that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from .models import open_model
from .options import METHODS, read_options
from .plots import plot_runs
from .run_folder import EVALUATIONS, FINAL, METRICS, read_lines
from .tasks import open_task

SUMMARY, TABLE, CURVES = "summary.json", "summary.md", "curves.png"
ENDS = 10
"""Steps at either end that figures are averaged over."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line says and write `summary.json`, `summary.md` and `curves.png`."""
    parser = argparse.ArgumentParser(
        prog="python -m sparse_cache.recipe.compare",
        description="Train by several methods from the same start; other options are train's.",
        allow_abbrev=False,
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--vary",
        nargs="+",
        default=[],
        metavar=("OPTION", "VALUE"),
        help="and by each of its values",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--output", type=Path, default=Path("runs/compare"))
    parser.add_argument(
        "--at-once",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at a time (CPU: 1 thread each)",
    )
    mine, others = parser.parse_known_args(arguments)
    mine.seeds = list(dict.fromkeys(mine.seeds))
    if len(mine.vary) == 1:
        parser.error(f"--vary {mine.vary[0]} needs at least one value.")
    started = time.perf_counter()
    starts = {seed: _start(mine.output, seed, others) for seed in mine.seeds}
    variants = _variants(mine.methods, mine.vary)
    jobs = [(name, seed) for seed in mine.seeds for name in variants]
    with ThreadPoolExecutor(mine.at_once) as pool:
        runs = [
            pool.submit(_run, mine.output, name, variants[name], seed, starts[seed], others)
            for name, seed in jobs
        ]
        for run in tqdm(runs, desc="runs"):
            run.result()
    rows = summarise(mine.output, list(variants), mine.seeds)
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} CPU cores, torch {torch.__version__}",
        "at_once": mine.at_once,
        "minutes": (time.perf_counter() - started) / 60,
        "options": others,
        "rows": rows,
    }
    (mine.output / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    table = as_table(rows)
    (mine.output / TABLE).write_text(table)
    for seed in mine.seeds:
        folders = {name: mine.output / f"seed-{seed}" / name for name in variants}
        plot_runs(folders, mine.output / f"seed-{seed}" / CURVES)
    print(table)


def _start(output: Path, seed: int, others: list[str]) -> list[str]:
    """Options that make all runs of a seed begin with the same weights."""
    folder = output / f"seed-{seed}"
    options = read_options([*others, "--seed", str(seed), "--output", str(folder)])
    if options.model != "tiny":
        return []
    task = open_task(options.task, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    open_model(options, task, Accelerator(cpu=True))
    return ["--model", str(folder / "warm-start")]


def _variants(methods: Sequence[str], vary: Sequence[str]) -> dict[str, list[str]]:
    """Options of each run, by its name."""
    variants = {method: ["--method", method] for method in methods}
    if not vary:
        return variants
    name, *values = vary
    return {
        f"{method}, {name} {value}": [*given, f"--{name.replace('_', '-')}", value]
        for method, given in variants.items()
        for value in values
    }


def _run(
    output: Path, name: str, given: list[str], seed: int, start: list[str], others: list[str]
) -> None:
    folder = output / f"seed-{seed}" / name
    asked = [*others, *start, *given]
    record = folder / "asked.json"
    if record.is_file() and json.loads(record.read_text()) != asked:
        raise SystemExit(
            f"{folder} is of a comparison with other options ({record}): choose another --output."
        )
    if (folder / FINAL).is_dir():
        return
    command = [sys.executable, "-m", "sparse_cache.recipe.train", *asked]
    command += ["--seed", str(seed), "--output", str(folder)]
    command += ["--progress", "false"]
    if list(folder.glob("checkpoint-*/state.json")):
        command.append("--resume")
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(asked))
    with (folder / "log.txt").open("a") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
    if code:
        last = (folder / "log.txt").read_text().strip().splitlines()[-1:]
        raise SystemExit(f"{name}, seed {seed} failed: {' '.join(last)} (see {folder}/log.txt)")


def summarise(output: Path, methods: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One row a run: where it began and ended."""
    rows = []
    for method in methods:
        for seed in seeds:
            folder = output / f"seed-{seed}" / method
            steps, evaluations = read_lines(folder / METRICS), read_lines(folder / EVALUATIONS)
            last = max(entry["step"] for entry in evaluations)
            row: dict[str, Any] = {"method": method, "seed": seed, "steps": len(steps)}
            for name, step in (("first", 0), ("last", last)):
                row[name] = {
                    entry["decoding"]: entry["accuracy"]
                    for entry in evaluations
                    if entry["step"] == step
                }
            for key in ("reward", "grad_norm", "mismatch/kl_k1", "mismatch/xi_p5", "rejected"):
                values = [entry[key] for entry in steps if entry.get(key) is not None]
                row[key] = [_mean(values[:ENDS]), _mean(values[-ENDS:])]
            norms = [entry["grad_norm"] for entry in steps if entry["grad_norm"] is not None]
            row["largest_grad_norm"] = max(norms, default=None)
            seconds = ("seconds/rollout", "seconds/reward", "seconds/score", "seconds/update")
            row["seconds_per_step"] = _mean([sum(entry[key] for key in seconds) for entry in steps])
            rows.append(row)
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    decodings = list(rows[0]["last"])
    head = ["method", "seed", "reward", "gradient norm (max)", "mismatch KL", "xi p5", "rejected"]
    lines = [head + [f"accuracy, {name}" for name in decodings]]
    for row in rows:
        ends = [f"{row[key][0]:.2f} → {row[key][1]:.2f}" for key in ("reward", "grad_norm")]
        ends[1] += f" ({row['largest_grad_norm']:.2f})"
        mismatch = row["mismatch/kl_k1"]
        lines.append(
            [row["method"], str(row["seed"]), *ends]
            + [f"{_round(mismatch[0])} → {_round(mismatch[1])}"]
            + [f"{row['mismatch/xi_p5'][1]:.2f}", f"{row['rejected'][1]:.2f}"]
            + [f"{row['first'][name]:.2f} → {row['last'][name]:.2f}" for name in decodings]
        )
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _round(value: float) -> str:
    """Two digits, and no sign on a zero."""
    return f"{value:.2f}".replace("-0.00", "0.00")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


if __name__ == "__main__":
    main()

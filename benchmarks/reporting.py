"""Tables on the terminal and figures in JSON files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .environment import describe_environment

RESULTS = Path(__file__).parent / "results"


def common_options(description: str) -> argparse.ArgumentParser:
    """An argument parser with the options that every part shares."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model",
        default="embedded",
        help="embedded (SmolLM2-135M-Instruct), tiny or small (random weights), "
        "or a transformers folder or hub name",
    )
    parser.add_argument("--quick", action="store_true", help="smoke run on a tiny random model")
    parser.add_argument(
        "--threads", type=int, default=None, help="torch threads (default: torch's)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON files")
    parser.add_argument("--note", default=None, help="a remark to keep beside the figures")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, then set the thread count and the seed that the options ask for."""
    options = parser.parse_args(arguments)
    if options.threads is not None:
        if options.threads < 1:
            parser.error(f"--threads must be at least 1, got {options.threads}.")
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.quick:
        options.model = "tiny"
    return options


def write_results(part: str, options: argparse.Namespace, results: dict[str, Any]) -> Path:
    """Write `<output>/<part>.json` with the environment and the settings, and say where it is."""
    settings = {k: value for k, value in vars(options).items() if k not in ("output", "note")}
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / f"{part}.json"
    content = {
        "part": part,
        "note": options.note,
        "environment": describe_environment(),
        "settings": settings,
        **results,
    }
    target.write_text(json.dumps(content, indent=1, allow_nan=False, default=str) + "\n")
    print(f"\nwrote {target}")
    return target


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a plain table, first column to the left, the others to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    print(f"\n{title}")
    for number, row in enumerate([list(header), *cells]):
        line = [row[0].ljust(widths[0])]
        line += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(line).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    sys.stdout.flush()


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The same table as Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def save_picture(figure: Any, target: Path) -> None:
    """Save a matplotlib figure and say where it is."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130, bbox_inches="tight", metadata={"Software": None})
    print(f"wrote {target}")


def pyplot() -> Any | None:
    """matplotlib's pyplot without a display, or None (with a notice) where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture is drawn.", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)

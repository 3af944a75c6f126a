"""Curves of one run, or of several beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .run_folder import EVALUATIONS, METRICS, read_lines

CURVES = {
    "reward": "reward of the sampler",
    "grad_norm": "gradient norm",
    "mismatch/kl_k3": "mismatch KL (nats a token)",
    "mismatch/xi_p5": "5th percentile of xi",
    "rejected": "rejected rollouts (share)",
    "entropy": "entropy (nats a token)",
}


def plot_run(folder: Path) -> Path | None:
    """Draw `curves.png` in a run's folder; None if there is nothing to draw yet."""
    if not (folder / METRICS).is_file():
        return None
    return plot_runs({folder.name: folder}, folder / "curves.png")


def plot_runs(folders: Mapping[str, Path], path: Path) -> Path:
    """Draw the curves of several runs into one picture.

    Args:
        folders: of runs, by the name that the legend gives them.
        path: of the picture.

    Returns:
        `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {name: _read(folder) for name, folder in folders.items()}
    decodings: list[str] = []
    for _, evaluations in runs.values():
        for entry in evaluations:
            if entry["decoding"] not in decodings:
                decodings.append(entry["decoding"])
    count = len(CURVES) + max(1, len(decodings))
    rows = -(-count // 3)
    figure = Figure(figsize=(12, 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 3, squeeze=False).flat
    for axis, (key, title) in zip(axes, CURVES.items(), strict=False):
        for name, (steps, _) in runs.items():
            points = [(entry["step"], entry[key]) for entry in steps if entry.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        if key == "grad_norm":
            axis.set_yscale("log")
        _finish(axis, title)
    for number, decoding in enumerate(decodings):
        axis = axes[len(CURVES) + number]
        for name, (_, evaluations) in runs.items():
            points = [
                (entry["step"], entry["accuracy"])
                for entry in evaluations
                if entry["decoding"] == decoding
            ]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="o", markersize=3)
        axis.set_ylim(-0.03, 1.03)
        _finish(axis, f"held-out accuracy, {decoding}")
    for number in range(len(CURVES) + len(decodings), rows * 3):
        axes[number].set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, dpi=110, format="png")
    beside.replace(path)
    return path


def _read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    def lines(name: str) -> list[dict[str, Any]]:
        return read_lines(folder / name) if (folder / name).is_file() else []

    return lines(METRICS), lines(EVALUATIONS)


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)

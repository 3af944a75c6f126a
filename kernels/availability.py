"""Whether the Triton kernels can run, and in one sentence why not."""

from __future__ import annotations

import importlib.util
import os

import torch

IMPLEMENTATIONS = ("auto", "reference", "triton")


def interpreted() -> bool:
    """Whether Triton's interpreter is on (`TRITON_INTERPRET=1`), which runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def missing_for_triton(device: torch.device) -> str | None:
    """What the kernels lack to run on tensors of `device`; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if device.type == "cuda" or (device.type == "cpu" and interpreted()):
        return None
    return (
        f"tensors on {device.type!r} cannot be read by a GPU kernel (move the model to a GPU, or "
        "set TRITON_INTERPRET=1 before Python starts to run the kernels slowly on the CPU)"
    )


def choose_implementation(implementation: str, device: torch.device) -> str:
    """`"reference"` or `"triton"` for tensors on `device`.

    Args:
        implementation: `"auto"` takes Triton on a GPU where it is installed and the reference
            elsewhere; an explicit name is taken or refused, never replaced.
        device: where the tensors lie.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: `"triton"` cannot run here.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown; choose one of "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    if implementation == "reference":
        return "reference"
    missing = missing_for_triton(device)
    if implementation == "auto":
        return "triton" if missing is None and device.type == "cuda" else "reference"
    if missing is not None:
        raise RuntimeError(f"implementation='triton' cannot run: {missing}.")
    return "triton"

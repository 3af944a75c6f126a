"""Traces in safetensors files."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .eviction_trace import NEVER, EvictionTrace

FORMAT = "sparse-budget-cache.eviction-trace"
VERSION = 1
_NEVER_16 = torch.iinfo(torch.int16).max


def save_trace(trace: EvictionTrace, path: str | os.PathLike[str]) -> None:
    """See `EvictionTrace.save`."""
    trace.validate()
    narrow = trace.tokens_seen < _NEVER_16
    tensors = {}
    for layer, death in zip(trace.layer_indices, trace.deaths, strict=True):
        death = death.cpu()
        if narrow:
            death = torch.where(death == NEVER, _NEVER_16, death).short()
        tensors[f"deaths.{layer}"] = death.contiguous()
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "tokens_seen": str(trace.tokens_seen),
        "layer_indices": json.dumps(trace.layer_indices),
    }
    target = Path(path)
    # Beside the target, so that moving it there is one step.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        save_file(tensors, name, metadata)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load_trace(path: str | os.PathLike[str]) -> EvictionTrace:
    """See `EvictionTrace.load`."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no trace at {os.fspath(path)!r}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{os.fspath(path)!r} is not a whole safetensors file ({error}); record it anew."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{os.fspath(path)!r} is a safetensors file, but not an eviction trace; pass what "
            "EvictionTrace.save wrote."
        )
    if not metadata.get("version", "").isdigit() or int(metadata["version"]) > VERSION:
        raise ValueError(
            f"{os.fspath(path)!r} has version {metadata.get('version')!r} of the format, this "
            f"release reads up to {VERSION}; upgrade sparse-budget-cache."
        )
    try:
        layers = [int(layer) for layer in json.loads(metadata["layer_indices"])]
        deaths = [_wide(tensors[f"deaths.{layer}"]) for layer in layers]
        trace = EvictionTrace(deaths, layers, int(metadata["tokens_seen"]))
        trace.validate()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a sound trace: {error}") from error
    return trace


def _wide(death: torch.Tensor) -> torch.Tensor:
    if death.dtype != torch.int16:
        return death
    return torch.where(death == _NEVER_16, NEVER, death.int())

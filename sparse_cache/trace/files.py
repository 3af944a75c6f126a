"""Traces in safetensors files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .eviction_trace import NEVER, EvictionTrace

FORMAT = "sparse-budget-cache.eviction-trace"
VERSION = 1
_WHOLE = re.compile(r"0|[1-9][0-9]{0,9}")
_LIST = re.compile(rf"\[(({_WHOLE.pattern})(, ?({_WHOLE.pattern}))*)?\]")
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
        "layer_indices": json.dumps(list(trace.layer_indices)),
        "sha256": _digest(tensors),
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
    version = metadata.get("version", "")
    if not _WHOLE.fullmatch(version) or not 1 <= int(version) <= VERSION:
        raise ValueError(
            f"{os.fspath(path)!r} has version {version[:20]!r} of the format, this release reads "
            f"up to {VERSION}; upgrade sparse-budget-cache."
        )
    try:
        layers, tokens_seen = _layers(metadata), metadata.get("tokens_seen", "")
        if not _WHOLE.fullmatch(tokens_seen):
            raise ValueError(f"tokens_seen={tokens_seen[:20]!r} is not a whole number.")
        names = {f"deaths.{layer}" for layer in layers}
        if names != tensors.keys():
            raise ValueError(
                f"its layers {layers} are not those of its tensors {sorted(tensors)[:4]}."
            )
        # Files of older releases have none.
        if metadata.get("sha256", digest := _digest(tensors)) != digest:
            raise ValueError("what it holds is not what was written; record it anew.")
        deaths = [_wide(tensors[f"deaths.{layer}"]) for layer in layers]
        trace = EvictionTrace(deaths, layers, int(tokens_seen))
        trace.validate()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)!r} is not a sound trace: {error}") from error
    return trace


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, shapes and contents: most changes of a death give a death that is as plausible."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _layers(metadata: dict[str, str]) -> list[int]:
    text = metadata.get("layer_indices", "")
    # Nothing but such a list is given to the parser, which would follow any depth of brackets.
    if not _LIST.fullmatch(text):
        raise ValueError(f"layer_indices={text[:20]!r} is not a list of whole numbers.")
    layers: list[int] = json.loads(text)
    return layers


def _wide(death: torch.Tensor) -> torch.Tensor:
    if death.dtype != torch.int16:
        return death
    return torch.where(death == _NEVER_16, NEVER, death.int())

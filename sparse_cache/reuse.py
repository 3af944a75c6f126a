"""Does what the cache holds still belong to what runs: the same text, the same weights?

A cache sees keys and values, never token ids, so a different prompt of sufficient length would be
continued as if it were the old one. `generate` marks the cache it is given before its first step;
at that moment its own arguments are looked at, once per call. What can be compared is the prompt of
the call before: a conversation whose generated part was edited looks like a continuation.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

import torch

_LEVELS = 8


def _prompt_of_generate() -> torch.Tensor | None:
    """The `input_ids` `[B, T]` of the `generate` call under way, expanded to its rows."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_LEVELS):
        if frame is None:
            return None
        if frame.f_code.co_name == "generate":
            prompt = frame.f_locals.get("input_ids")
            if isinstance(prompt, torch.Tensor) and prompt.dim() == 2 and prompt.shape[1]:
                return prompt
            return None
        frame = frame.f_back
    return None


def check_continuation(earlier: torch.Tensor | None, seen: int) -> torch.Tensor | None:
    """Compare the prompt of the call under way with the one that the cache began with.

    Args:
        earlier: token ids `[B, T]` of the last prompt, or None.
        seen: columns that the cache has seen.

    Returns:
        The token ids to compare the next call with.

    Raises:
        ValueError: the new prompt does not begin with the earlier one, or has nothing new.
    """
    prompt = _prompt_of_generate()
    if prompt is None:
        return earlier
    if not seen:
        return prompt.detach().clone()
    if prompt.shape[1] <= seen:
        raise ValueError(
            f"the prompt has {prompt.shape[1]} tokens but the cache has already seen {seen}; to "
            "continue, pass the whole conversation with something new at its end, and for another "
            "prompt call cache.reset() or make a new cache."
        )
    if earlier is not None and earlier.shape[0] == prompt.shape[0]:
        start = prompt[:, : earlier.shape[1]].to(earlier.device)
        if not torch.equal(start, earlier):
            raise ValueError(
                "the prompt does not begin with the text that the cache holds; to continue, pass "
                "the whole conversation, and for another prompt call cache.reset() or make a new "
                "cache."
            )
    return prompt.detach().clone()


class Weights(NamedTuple):
    """What tells whether an attention module and its weights are those of earlier tokens."""

    module: int
    parameters: int
    version: int
    """How often the parameters were written in place."""
    sample: tuple[float, ...] | None
    """Sums over a few numbers of each parameter, which also show writes that hide from torch."""


def check_weights(earlier: Weights | None, module: torch.nn.Module, *, thoroughly: bool) -> Weights:
    """Compare `module` with what it was when the cache's tokens were computed.

    Sharded and offloaded models swap their parameters for others with the same content, so writes
    are counted only while the parameters are the same objects.

    Args:
        earlier: what it was, None if the cache is empty.
        module: the attention module of the layer that the model runs first.
        thoroughly: look at the numbers too, which waits for the device.

    Raises:
        ValueError: another model's module.
        RuntimeError: other weights.
    """
    parameters = [p for p in module.parameters() if not p.is_inference()]
    version = sum(p._version for p in parameters)
    sample = tuple(map(_sample, parameters)) if thoroughly else None
    now = Weights(id(module), hash(tuple(map(id, parameters))), version, sample)
    if earlier is None:
        return now
    if now.module != earlier.module:
        raise ValueError(
            "the cache holds tokens of another model; call cache.reset() or make a new cache."
        )
    written = now.parameters == earlier.parameters and now.version != earlier.version
    if None in (now.sample, earlier.sample):
        now = now._replace(sample=now.sample or earlier.sample)
    elif now.sample != earlier.sample:
        written = True
    if written:
        raise RuntimeError(
            "the model's weights changed since the cache was filled; call cache.reset() after an "
            "update of the weights."
        )
    return now


def _sample(parameter: torch.Tensor) -> float:
    if type(parameter) not in (torch.Tensor, torch.nn.Parameter) or parameter.is_meta:
        return 0.0  # distributed and packed tensors, whose numbers are not simply there
    flat = parameter.detach().flatten()
    return float(flat[:: max(1, flat.numel() // 64)].double().nan_to_num().sum())

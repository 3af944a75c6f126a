"""Does what the cache holds still belong to what runs: the same text, the same weights?

A cache sees keys and values, never token ids, so a different prompt of sufficient length would be
continued as if it were the old one. `generate` marks the cache it is given before its first step;
at that moment its own arguments are looked at, once per call. What can be compared is the prompt of
the call before: a conversation whose generated part was edited looks like a continuation.
"""

from __future__ import annotations

import sys
from types import FrameType

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


def weights_version(module: torch.nn.Module) -> tuple[int, int]:
    """Two numbers: which parameters `module` has, and how often they were written in place.

    Sharded and offloaded models swap their parameters for others with the same content, so only a
    change of the second number with the same first one says that the weights changed.
    """
    parameters = [p for p in module.parameters() if not p.is_inference()]
    return hash(tuple(map(id, parameters))), sum(p._version for p in parameters)

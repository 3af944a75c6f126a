"""What a model asks of its attention function, for those who compute attention in its place."""

from __future__ import annotations

from typing import Any

import torch

_KNOWN = frozenset({"scaling", "softcap", "s_aux", "sinks", "is_causal", "dropout"})
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "kwargs",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that models pass on to attention and that change nothing there."""


def unknown_arguments(rest: tuple[Any, ...], arguments: dict[str, Any]) -> set[str]:
    """Arguments that ask for more than causal attention with a softcap and sinks.

    Args:
        rest: attention's positional arguments behind the mask.
        arguments: its keyword arguments.
    """
    others = {
        name
        for name, value in arguments.items()
        if name not in _KNOWN | _WITHOUT_EFFECT and value is not None and value is not False
    }
    if arguments.get("is_causal") is False:
        others.add("is_causal=False")
    if arguments.get("dropout"):
        others.add(f"dropout={arguments['dropout']}")
    if rest:
        others.add("positional arguments")
    return others


def scaling_of(query: torch.Tensor, arguments: dict[str, Any]) -> float:
    """Factor of the logits of queries `[..., D]`."""
    scaling = arguments.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)


def softcap_of(arguments: dict[str, Any]) -> float | None:
    """Where the logits saturate (Gemma 2)."""
    return arguments.get("softcap")


def sinks_of(arguments: dict[str, Any]) -> torch.Tensor | None:
    """`[Hq]`: extra logits in the denominator (gpt-oss)."""
    sinks = arguments.get("s_aux")
    return arguments.get("sinks") if sinks is None else sinks

"""What the last queries of a row say about its stored keys; shared by the policies that ask."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .base import LayersView, PolicyView

POOLINGS = ("avg", "max")
GROUP_REDUCTIONS = ("mean", "max")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        known = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be {known}, got {value!r}.")


def check_kernel_size(kernel_size: int) -> None:
    """Raise ValueError unless `kernel_size` is a positive odd integer."""
    if (
        isinstance(kernel_size, bool)
        or not isinstance(kernel_size, int)
        or kernel_size < 1
        or kernel_size % 2 == 0
    ):
        raise ValueError(
            f"kernel_size must be a positive odd integer, got {kernel_size!r}; 1 means no pooling."
        )


def check_share(name: str, value: float, lowest: float, highest: float) -> None:
    """Raise ValueError unless `value` is a number in `[lowest, highest]`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or not lowest <= value <= highest
    ):
        raise ValueError(f"{name} must be a number in [{lowest}, {highest}], got {value!r}.")


def grouped_queries(view: PolicyView, policy: str) -> torch.Tensor:
    """Return the last queries by KV head, `[B, H, G, W, D]` in their own dtype.

    Raises:
        ValueError: the view carries no query.
    """
    if view.queries is None or view.queries.shape[2] == 0:
        raise ValueError(
            f"policy {policy!r} scores with the last queries and got none; "
            "use a window of at least 1, or a policy that needs no queries."
        )
    return view.queries.unflatten(1, (view.keys.shape[1], -1))


def required_queries(queries: list[torch.Tensor] | None, policy: str) -> list[torch.Tensor]:
    """Return the last queries of all layers.

    Raises:
        ValueError: there are none.
    """
    if queries is None:
        raise ValueError(f"policy {policy!r} scores with the last queries and got none.")
    return queries


def older_than_window(scores: torch.Tensor, view: LayersView) -> torch.Tensor:
    """Zero the scores `[L, B, H, S]` of the window's tokens, in place."""
    index = torch.arange(view.stored, device=scores.device)
    return scores.masked_fill_(index >= (view.lengths - view.window).unsqueeze(-1), 0.0)


def attention_probabilities(queries: torch.Tensor, view: PolicyView) -> torch.Tensor:
    """Causal attention of the newest `W` tokens over all stored keys, computed in float32.

    Args:
        queries: `[B, H, G, W, D]`, the last one is the newest stored token's.
        view: the stored tokens.

    Returns:
        float32 `[B, H, G, W, S]`, rows sum to one, 0 where a key is younger than the query.
    """
    logits = queries.float() @ view.keys.float().transpose(-1, -2)[:, :, None] * view.scaling
    width, stored = logits.shape[-2:]
    keys = torch.arange(stored, device=logits.device)
    younger = keys > keys[stored - width :, None]
    return logits.masked_fill(younger, -torch.inf).softmax(dim=-1)


def pool(scores: torch.Tensor, kernel_size: int, pooling: str) -> torch.Tensor:
    """Smooth `[B, H, S]` along `S` with an odd kernel; the length stays.

    "avg" counts the places beyond both ends as zeros, "max" leaves them out.
    """
    if pooling == "max":
        return F.max_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)
    return F.avg_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)

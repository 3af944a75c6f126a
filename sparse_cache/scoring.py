"""From stored tokens to the slots that stay, by way of the policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .policies import PolicyView
from .selection import select_kept
from .settings import BudgetSettings


@dataclass(frozen=True)
class Candidates:
    """The tokens of some rows of one layer, among which an eviction chooses; all are real."""

    keys: torch.Tensor
    """`[b, Hk, S, D]` as attention saw them; `Hk` may differ from the heads that are stored."""
    values: torch.Tensor
    """`[b, Hk, S, Dv]`."""
    positions: torch.Tensor
    """`[b, H, S]` int32."""
    mass: torch.Tensor | None
    """`[b, H, S]` float32, if the policy asks for it."""
    queries: torch.Tensor | None
    """`[b, Hq, W, Dq]`, if the policy asks for them."""
    seen: list[int]
    """Real tokens that each row has seen."""
    scaling: float
    layer_idx: int


def score_tokens(tokens: Candidates, keep: int, settings: BudgetSettings) -> torch.Tensor:
    """The policy's scores of the candidates, `[b, Hk, S]`, as it gave them.

    Args:
        tokens: what there is to choose from.
        keep: how many stay per head, on average where heads share.
        settings: the policy and what it may not touch.

    Raises:
        ValueError: keys that hold NaN, or a policy whose scores have a wrong shape or that wrote
            into its view.
        TypeError: a policy whose scores are no tensor of numbers.
    """
    policy = settings.policy
    check_keys(tokens.keys, tokens.layer_idx)
    heads = tokens.keys.shape[1]
    mass = tokens.mass
    view = PolicyView(
        keys=tokens.keys,
        values=tokens.values,
        positions=_with_heads(tokens.positions, heads).long(),
        seen=torch.tensor(tokens.seen, device=tokens.keys.device),
        queries=tokens.queries,
        attention_mass=None if mass is None else _with_heads(mass, heads),
        scaling=tokens.scaling,
        window=settings.window,
        sinks=settings.sinks,
        budget=keep,
        layer_idx=tokens.layer_idx,
    )
    versions = _versions(view)
    scores = policy.score(view)
    if versions != _versions(view):
        raise ValueError(
            f"policy {policy.name or type(policy).__name__!r} wrote into the view it was given; "
            "that is the cache itself, so compute on copies."
        )
    if not isinstance(scores, torch.Tensor) or scores.is_complex():
        raise TypeError(
            f"policy {policy.name or type(policy).__name__!r} returned "
            f"{getattr(scores, 'dtype', type(scores).__name__)}; expected a float32 tensor."
        )
    if scores.shape != tokens.keys.shape[:3]:
        raise ValueError(
            f"policy {policy.name or type(policy).__name__!r} returned scores of shape "
            f"{tuple(scores.shape)}; expected {tuple(tokens.keys.shape[:3])}: rows, KV heads, "
            "tokens."
        )
    return scores


def choose_kept(
    tokens: Candidates, keep: int, settings: BudgetSettings, *, heads_together: bool
) -> torch.Tensor:
    """Score the candidates and return the slots that stay, `[b, H, keep]` int64, ascending.

    Args:
        tokens: what there is to choose from.
        keep: how many stay.
        settings: the policy and what it may not touch.
        heads_together: keep the same tokens in all heads, by the mean of their scores.

    Raises:
        ValueError, TypeError: see `score_tokens`.
    """
    scores = score_tokens(tokens, keep, settings)
    if heads_together:
        scores = scores.float().mean(dim=1, keepdim=True).expand(-1, tokens.positions.shape[1], -1)
    return select_kept(
        scores,
        keep=keep,
        window=settings.window,
        sinks=settings.sinks if settings.policy.keeps_sinks else 0,
        positions=tokens.positions,
    )


def check_keys(keys: torch.Tensor, layer_idx: int) -> None:
    """Raise ValueError if `keys` of a layer hold NaN."""
    if bool(torch.isnan(keys).any()):
        raise ValueError(
            f"the keys of layer {layer_idx} hold NaN ({keys.dtype}), so the model's "
            "output is already lost; run the model in bfloat16 or float32."
        )


def _versions(view: PolicyView) -> list[int]:
    """How often each tensor of the view has been written in place."""
    tensors = (view.keys, view.values, view.queries, view.attention_mass)
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def _with_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """`[b, H, S]` with `heads` heads; where that changes the number, all heads hold the same."""
    return tensor if tensor.shape[1] == heads else tensor[:, :1].expand(-1, heads, -1)

"""Rollouts of small models under a budget, and the same by replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparse_cache import EvictionTrace, SparseBudgetCache
from sparse_cache.replay import replay
from tests.cache.driving import SMALL, decode, left_padded


@dataclass
class Rollout:
    """What was sampled, and from what."""

    sequences: torch.Tensor
    """`[B, T]`, left-padded."""
    mask: torch.Tensor
    """`[B, T]` int64."""
    prompt_length: int
    logits: torch.Tensor
    """`[B, N, V]`: what the last `N` tokens were chosen from."""
    trace: EvictionTrace


def rollout(
    model: Any,
    lengths: tuple[int, ...] = (40, 23, 9),
    new_tokens: int = 30,
    *,
    seed: int = 0,
    **settings: Any,
) -> Rollout:
    """Greedy generation under a small budget that prompts of 25 tokens overflow."""
    ids, real = left_padded(list(lengths), seed)
    cache = SparseBudgetCache(**(SMALL | settings), record=True)
    output = decode(model, cache, ids, attention_mask=real, new_tokens=new_tokens)
    new = real.new_ones(len(lengths), new_tokens)
    return Rollout(
        sequences=output.sequences,
        mask=torch.cat([real, new], dim=1),
        prompt_length=ids.shape[1],
        logits=torch.stack(output.logits, dim=1).float(),
        trace=cache.trace(),
    )


def replayed(model: Any, run: Rollout, way: str = "auto", **call: Any) -> torch.Tensor:
    """Logits `[B, T, V]` of the whole sequences under the trace."""
    with replay(model, run.trace, way=way):
        return model(run.sequences, attention_mask=run.mask, **call).logits


def gap(logits: torch.Tensor, run: Rollout) -> float:
    """Largest difference of the new tokens' log-probabilities from those of the sampler."""
    tokens = run.sequences[:, run.prompt_length :, None]
    mine = logits[:, run.prompt_length - 1 : -1].float().log_softmax(-1).gather(-1, tokens)
    theirs = run.logits.log_softmax(-1).gather(-1, tokens)
    return float((mine - theirs).abs().max())


def score(logits: torch.Tensor, run: Rollout) -> torch.Tensor:
    """A loss: the negative log-likelihood of the sequences."""
    likelihood = logits[:, :-1].float().log_softmax(-1)
    likelihood = likelihood.gather(-1, run.sequences[:, 1:, None])[..., 0]
    return -(likelihood * run.mask[:, :-1]).sum()


def gradients(model: Any, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """All gradients of `loss()`, flat."""
    model.zero_grad()
    loss().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference of two gradients."""
    return float((one - other).norm() / other.norm())

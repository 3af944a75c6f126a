"""How far an answer under a budget is from the dense one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from ..progress import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache import SparseBudgetCache


def share_of_equal_tokens(first: torch.Tensor, second: torch.Tensor) -> float:
    """Positions at which two answers `[N]` and `[M]` have the same token, over `max(N, M)`."""
    longest = max(len(first), len(second))
    shortest = min(len(first), len(second))
    return (first[:shortest] == second[:shortest]).sum().item() / longest if longest else 1.0


@dataclass(frozen=True)
class Divergence:
    """Differences between two next-token distributions along the same text."""

    mean_kl: float
    """Mean over the steps of KL(dense || sparse), in nats, over the whole vocabulary."""
    same_top_token: float
    """Share of the steps at which both have the same likeliest token."""


@quiet_transformers()
@torch.inference_mode()
def replayed_divergence(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    answer: torch.Tensor,
    cache: SparseBudgetCache,
    advance: Callable[[float], None] = lambda share: None,
    *,
    chunk: int = 64,
) -> Divergence:
    """Feed the same tokens to a dense cache and to `cache`, and compare what comes next.

    The sparse side goes token by token, as in generation, so that evictions happen at the same
    steps and the distributions are exactly those that generation would have sampled from. The dense
    side goes in chunks, which gives the same numbers sooner.

    Args:
        model: a causal language model.
        prompt: `[1, T]` int64.
        answer: `[N]` int64, N at least 1: normally the dense answer.
        cache: an unused cache; it has seen the text afterwards.
        advance: called with the share of the answer that is done.
        chunk: tokens whose dense logits are held at once.
    """
    prompt = prompt.to(model.device)
    answer = answer.to(model.device)
    dense = DynamicCache(config=model.config)
    # The distribution of answer[i] comes from the tokens before it, so the last is never fed.
    dense_logits = model(prompt, past_key_values=dense, use_cache=True).logits[:, -1]
    sparse_logits = model(prompt, past_key_values=cache, use_cache=True).logits[:, -1]
    total_kl, same = _compare(dense_logits, sparse_logits)
    for start in range(0, len(answer) - 1, chunk):
        tokens = answer[start : min(start + chunk, len(answer) - 1)].unsqueeze(0)
        rows = model(tokens, past_key_values=dense, use_cache=True).logits[0]
        for step in range(tokens.shape[1]):
            token = tokens[:, step : step + 1]
            logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
            kl, equal = _compare(rows[step : step + 1], logits)
            total_kl += kl
            same += equal
            advance((start + step + 1) / len(answer))
    return Divergence(total_kl / len(answer), same / len(answer))


def _compare(dense: torch.Tensor, sparse: torch.Tensor) -> tuple[float, int]:
    """KL(dense || sparse) and whether the likeliest tokens agree, for logits `[1, V]`."""
    log_p = dense.float().log_softmax(-1)
    log_q = sparse.float().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum().item()
    return kl, int(log_p.argmax().item() == log_q.argmax().item())

"""Small models, and calls of them chunk by chunk, that the tests of the cache share."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_cache import SparseBudgetCache, policy_names

VOCABULARY = 61
POLICIES = policy_names()
SMALL = {"budget": 20, "interval": 5, "window": 4, "sinks": 2}
"""A cache that a prompt of 40 tokens overflows."""
LARGE = {"budget": 500, "interval": 50, "window": 4, "sinks": 2}
"""A cache that no test here fills."""


@functools.cache
def small_llama(
    *,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    head_size: int = 8,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A random Llama whose attention is far from uniform, so that a wrong token shows."""
    torch.manual_seed(seed)
    heads = kv_heads * group
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8 * heads,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and the 2D mask `[B, max(lengths)]` of rows with these many real tokens."""
    width = max(lengths)
    ids = tokens(len(lengths), width, seed)
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return ids.masked_fill(~real, 0), real.long()


@torch.no_grad()
def drive(
    model: LlamaForCausalLM,
    cache: Any,
    ids: torch.Tensor,
    real: torch.Tensor | None = None,
    chunks: list[int] | None = None,
    *,
    start: int = 0,
) -> torch.Tensor:
    """Call the model on columns `start ..` in these chunks, return all logits `[B, T, V]`.

    Positions count each row's real tokens, as `generate` has them.
    """
    chunks = chunks or [ids.shape[1] - start]
    positions = None if real is None else (real.cumsum(-1) - 1).clamp(min=0)
    logits = []
    for length in chunks:
        stop = start + length
        arguments = {}
        if real is not None:
            arguments["attention_mask"] = real[:, :stop]
            arguments["position_ids"] = positions[:, start:stop]
        output = model(ids[:, start:stop], past_key_values=cache, use_cache=True, **arguments)
        logits.append(output.logits)
        start = stop
    return torch.cat(logits, dim=1)


def decode(
    model: LlamaForCausalLM, cache: Any, prompt: torch.Tensor, new_tokens: int = 30, **more: Any
) -> Any:
    """Greedy `generate` that also returns its logits."""
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    settings |= {"max_new_tokens": new_tokens, "pad_token_id": 0}
    # Without a mask `generate` would take every token 0 of an earlier answer for padding.
    settings["attention_mask"] = torch.ones_like(prompt)
    return model.generate(prompt, past_key_values=cache, **(settings | more))


def largest_difference(first: Any, second: Any) -> float:
    """Of the logits of two `generate` outputs."""
    assert len(first.logits) == len(second.logits)
    return max((a - b).abs().max().item() for a, b in zip(first.logits, second.logits, strict=True))


class Schedule:
    """How many tokens a row must store after each chunk, counted apart from the library."""

    def __init__(self, cache: SparseBudgetCache) -> None:
        settings = cache.settings
        self.budget, self.interval = settings.budget, settings.interval
        self.floor = settings.window + (settings.sinks if settings.policy.keeps_sinks else 0)
        self.seen = self.stored = self.evictions = 0
        self.full = self._keep() + self.interval

    def _keep(self) -> int:
        if isinstance(self.budget, int):
            return self.budget
        return max(math.ceil(self.budget * self.seen), self.floor)

    def take(self, new: int) -> None:
        """A chunk with `new` real tokens was processed."""
        self.seen += new
        self.stored += new
        if self.stored >= self.full:
            self.stored = min(self.stored, self._keep())
            self.full = self._keep() + self.interval
            self.evictions += 1

"""Decoding loops that can be timed step by step: with the budgeted cache and with a dense one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from .models import cache_argument


class SparseDecoding:
    """Decodes with a `SparseBudgetCache` in its steady state.

    Construction feeds `budget + interval` random tokens, after which every row has just evicted:
    from here on each `interval` steps hold exactly one eviction.

    Args:
        model: a causal language model.
        batch: rows.
        budget, interval, policy, record: as for `SparseBudgetCache`.
        masked: pass the attention mask that `generate` passes, one column a token seen.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch: int,
        budget: int,
        interval: int,
        policy: Any,
        masked: bool,
        record: bool = False,
    ) -> None:
        from sparse_cache import SparseBudgetCache

        self.cache = SparseBudgetCache(
            budget=budget, interval=interval, policy=policy, record=record
        )
        self._feed = _Feeder(model, batch, masked)
        vocabulary = model.config.get_text_config().vocab_size
        prompt = torch.randint(vocabulary, (batch, budget + interval))
        self._feed(self.cache, prompt, seen=0)
        self.seen = budget + interval
        self._feed.prepare(self.seen)

    def step(self) -> None:
        """Decode one token in every row."""
        self._feed.decode(self.cache)

    def after(self) -> None:
        """Count the token; the next mask is made here, as `generate` makes it between steps."""
        self.seen += 1
        self._feed.prepare(self.seen)


class DenseDecoding:
    """Decodes with a `DynamicCache` prefilled with random keys and values.

    Args:
        model: a causal language model.
        batch: rows.
        tokens: tokens that attention sees in the first step, the new one included.
        constant: take the new token back after each step, untimed, so that every step sees
            exactly `tokens`. Otherwise the cache grows as in any generation.
        masked: pass the attention mask that `generate` passes.
    """

    def __init__(
        self, model: Any, *, batch: int, tokens: int, constant: bool, masked: bool
    ) -> None:
        config = model.config.get_text_config()
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.cache = DynamicCache()
        shape = (batch, config.num_key_value_heads, tokens - 1, head_size)
        for layer in range(config.num_hidden_layers):
            self.cache.update(torch.randn(shape), torch.randn(shape), layer)
        self.constant = constant
        self.seen = tokens - 1
        self._feed = _Feeder(model, batch, masked)
        self._feed.prepare(self.seen)

    def step(self) -> None:
        """Decode one token in every row."""
        self._feed.decode(self.cache)

    def after(self) -> None:
        """Take the token back, or count it."""
        if self.constant:
            self.cache.crop(-1)
        else:
            self.seen += 1
            self._feed.prepare(self.seen)


class _Feeder:
    def __init__(self, model: Any, batch: int, masked: bool) -> None:
        self.model = model
        self.masked = masked
        self.name = cache_argument(model)
        vocabulary = model.config.get_text_config().vocab_size
        self.tokens = torch.randint(vocabulary, (batch, 1))
        self.mask: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self, cache: Any, tokens: torch.Tensor, seen: int) -> None:
        self.prepare(seen + tokens.shape[1] - 1)
        inputs = {"input_ids": tokens, "attention_mask": self.mask, self.name: cache}
        self.model(**inputs, logits_to_keep=1)

    def prepare(self, seen: int) -> None:
        if self.masked:
            self.mask = torch.ones(self.tokens.shape[0], seen + 1, dtype=torch.long)

    @torch.no_grad()
    def decode(self, cache: Any) -> None:
        inputs = {"input_ids": self.tokens, "attention_mask": self.mask, self.name: cache}
        self.model(**inputs)

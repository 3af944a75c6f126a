"""The core promise on a tiny model, under whatever supported transformers is installed.

`make test` runs it under the newest release, `make test-oldest` under the oldest.
"""

from __future__ import annotations

import os

import torch
import transformers
from transformers import DynamicCache

from sparse_cache import SparseBudgetCache
from sparse_cache.compatibility import FIRST_UNSUPPORTED, OLDEST
from tests.tiny_model import tiny_llama

PROMPT = torch.arange(1, 21).unsqueeze(0)


def _generate(cache: object, new_tokens: int = 60) -> torch.Tensor:
    return tiny_llama().generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )


def test_the_installed_release_is_the_one_meant() -> None:
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert OLDEST <= (major, minor) < FIRST_UNSUPPORTED
    expected = os.environ.get("SPARSE_CACHE_EXPECTED_TRANSFORMERS")
    assert expected in (None, transformers.__version__)


def test_nothing_changes_while_nothing_is_evicted() -> None:
    assert torch.equal(_generate(SparseBudgetCache(budget=200)), _generate(DynamicCache()))


def test_the_budget_holds() -> None:
    cache = SparseBudgetCache(budget=24, interval=8, window=4, sinks=2, record=True)
    _generate(cache)
    stats = cache.stats()
    assert stats.tokens_seen == 79  # the last token is generated, but not fed
    assert 24 <= stats.tokens_kept < 32
    assert stats.evictions > 0
    held = (cache.trace().deaths[0] == 2**31 - 1).sum(-1)
    assert torch.equal(held, torch.full_like(held, stats.tokens_kept))

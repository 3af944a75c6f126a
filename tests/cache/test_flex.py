"""FlexAttention under the cache.

It runs uncompiled here: compiled FlexAttention on a CPU is not what this library can vouch for.
"""

from __future__ import annotations

import pytest
import torch

from sparse_cache import SparseBudgetCache

from .driving import SMALL, drive, left_padded, small_llama, tokens


@pytest.mark.parametrize("policy", ["rkv", "streaming"])
def test_flex_attention_gives_what_sdpa_gives(policy: str) -> None:
    flex, plain = small_llama(attention="flex_attention", head_size=16), small_llama(head_size=16)
    ids, real = left_padded([34, 11])
    ids = torch.cat([ids, tokens(2, 12, seed=1)], dim=1)
    real = torch.cat([real, torch.ones(2, 12, dtype=torch.long)], dim=1)
    chunks = [34, *[1] * 12]
    caches = [SparseBudgetCache(**SMALL, policy=policy, record=True) for _ in range(2)]
    expected = drive(plain, caches[0], ids, real, chunks)
    with torch.compiler.set_stance("force_eager"):
        got = drive(flex, caches[1], ids, real, chunks)
    assert (expected - got)[real.bool()].abs().max().item() < 1e-4
    for a, b in zip(*(cache.trace().deaths for cache in caches), strict=True):
        assert torch.equal(a, b)

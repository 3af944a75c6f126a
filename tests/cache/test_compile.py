"""A compiled model under the cache gives what the model gives."""

from __future__ import annotations

import copy

import pytest
import torch

from sparse_cache import SparseBudgetCache

from .driving import SMALL, drive, left_padded, small_llama, tokens


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["rkv"])
def test_compiled_forward_of_a_padded_batch(policy: str) -> None:
    torch.compiler.reset()
    model = small_llama()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    ids, real = left_padded([34, 11])
    ids = torch.cat([ids, tokens(2, 12, seed=1)], dim=1)
    real = torch.cat([real, torch.ones(2, 12, dtype=torch.long)], dim=1)
    caches = [SparseBudgetCache(**SMALL, policy=policy, record=True) for _ in range(2)]
    chunks = [34, *[1] * 12]
    eager = drive(model, caches[0], ids, real, chunks)
    other = drive(compiled, caches[1], ids, real, chunks)
    assert (eager - other)[real.bool()].abs().max().item() < 1e-4
    for a, b in zip(*(cache.trace().deaths for cache in caches), strict=True):
        assert torch.equal(a, b)
    assert caches[1].stats().evictions >= 4

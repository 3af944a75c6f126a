"""Invariant 1: with a budget that is never reached, the cache is `DynamicCache`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from sparse_cache import SparseBudgetCache

from .driving import LARGE, POLICIES, decode, drive, largest_difference, left_padded, small_llama

TOLERANCE = 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_generate_gives_the_same_tokens_and_logits(policy: str, attention: str) -> None:
    model = small_llama(attention=attention)
    ids, real = left_padded([30, 17, 4])
    dense = decode(model, DynamicCache(), ids, attention_mask=real)
    cache = SparseBudgetCache(**LARGE, policy=policy)
    sparse = decode(model, cache, ids, attention_mask=real)
    assert torch.equal(dense.sequences, sparse.sequences)
    scale = max(step.abs().max().item() for step in dense.logits)
    assert largest_difference(dense, sparse) < TOLERANCE * max(1.0, scale)
    assert cache.stats().evictions == 0


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_size=st.sampled_from([2, 6, 10]),
    window=st.integers(1, 6),
    sinks=st.integers(0, 5),
    interval=st.integers(1, 20),
    policy=st.sampled_from(POLICIES),
)
def test_chunks_give_the_same_logits(
    lengths: list[int],
    cuts: list[int],
    kv_heads: int,
    group: int,
    head_size: int,
    window: int,
    sinks: int,
    interval: int,
    policy: str,
) -> None:
    model = small_llama(kv_heads=kv_heads, group=group, head_size=head_size)
    ids, real = left_padded(lengths)
    chunks, left = [], ids.shape[1]
    for cut in cuts:
        chunks.append(min(cut, left))
        left -= chunks[-1]
        if not left:
            break
    else:
        chunks.append(left)
    dense = drive(model, DynamicCache(), ids, real, chunks)
    # Exactly as many tokens as fit: one more would evict.
    budget = max(max(lengths) - interval + 1, window + sinks)
    cache = SparseBudgetCache(
        budget, interval=interval, window=window, sinks=sinks, policy=policy, record=True
    )
    sparse = drive(model, cache, ids, real, chunks)
    scale = max(1.0, dense.abs().max().item())
    assert (dense - sparse)[real.bool()].abs().max().item() < TOLERANCE * scale
    assert cache.stats().evictions == 0


def test_single_row_prefill_is_equal_to_the_bit() -> None:
    model = small_llama()
    ids, _ = left_padded([25])
    dense = drive(model, DynamicCache(), ids)
    assert torch.equal(drive(model, SparseBudgetCache(**LARGE), ids), dense)
    # What is evicted afterwards cannot change the prompt's own logits.
    cache = SparseBudgetCache(budget=8, interval=2, window=2, sinks=1)
    assert torch.equal(drive(model, cache, ids), dense)
    assert cache.layers[0].lengths == [8]

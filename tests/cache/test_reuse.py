"""Invariant 9: going on works; another prompt or other weights are refused, never mixed in."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from sparse_cache import SparseBudgetCache

from .driving import (
    LARGE,
    POLICIES,
    SMALL,
    decode,
    drive,
    largest_difference,
    small_llama,
    tokens,
)


def used(**settings: object) -> tuple[SparseBudgetCache, torch.Tensor]:
    cache = SparseBudgetCache(**(settings or SMALL))
    return cache, decode(small_llama(), cache, tokens(1, 40)).sequences


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_without_eviction_are_dense(policy: str) -> None:
    model = small_llama()
    cache, text = used(**LARGE, policy=policy)
    for turn in range(3):
        text = torch.cat([text, tokens(1, 9, seed=turn)], dim=1)
        dense = decode(model, DynamicCache(), text)
        sparse = decode(model, cache, text)
        assert torch.equal(dense.sequences, sparse.sequences)
        assert largest_difference(dense, sparse) < 1e-4
        text = sparse.sequences


@pytest.mark.parametrize("policy", POLICIES)
def test_a_turn_is_the_same_as_chunks(policy: str) -> None:
    """What `generate` does in two turns is what direct calls in the same chunks do."""
    model = small_llama()
    cache, text = used(**SMALL, policy=policy)
    turn = torch.cat([text, tokens(1, 9, seed=1)], dim=1)
    output = decode(model, cache, turn)
    by_hand = SparseBudgetCache(**SMALL, policy=policy)
    logits = drive(model, by_hand, output.sequences[:, :-1], None, [40, *[1] * 29, 10, *[1] * 29])
    assert (logits[:, -30:] - torch.stack(output.logits, dim=1)).abs().max().item() < 1e-3


@pytest.mark.parametrize(
    ("length", "words"),
    [(20, "has 20 tokens but the cache has already seen 69"), (90, "does not begin with")],
)
def test_another_prompt_is_refused(length: int, words: str) -> None:
    cache, _ = used()
    with pytest.raises(ValueError, match=rf"{words}.*cache\.reset\(\)"):
        decode(small_llama(), cache, tokens(1, length, seed=7))


def test_the_same_prompt_again_is_refused() -> None:
    cache, text = used()
    with pytest.raises(ValueError, match="has 40 tokens but the cache has already seen 69"):
        decode(small_llama(), cache, text[:, :40])


def test_a_refused_call_leaves_the_cache_usable() -> None:
    cache, text = used()
    turn = torch.cat([text, tokens(1, 9)], dim=1)
    expected = decode(small_llama(), copy.deepcopy(cache), turn)
    with pytest.raises(ValueError, match="does not begin with"):
        decode(small_llama(), cache, tokens(1, 90, seed=7))
    assert torch.equal(decode(small_llama(), cache, turn).sequences, expected.sequences)


def test_another_prompt_after_reset_is_as_new() -> None:
    cache, _ = used()
    cache.reset()
    again = decode(small_llama(), cache, tokens(1, 50, seed=7))
    fresh = decode(small_llama(), SparseBudgetCache(**SMALL), tokens(1, 50, seed=7))
    assert torch.equal(again.sequences, fresh.sequences)


@pytest.mark.parametrize("change", ["in place", "optimizer"])
def test_changed_weights_are_refused(change: str) -> None:
    model = copy.deepcopy(small_llama())
    cache = SparseBudgetCache(**SMALL)
    text = decode(model, cache, tokens(1, 40)).sequences
    if change == "in place":
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(text).logits.sum().backward()
        optimizer.step()
    turn = torch.cat([text, tokens(1, 9)], dim=1)
    with pytest.raises(RuntimeError, match=r"weights changed.*cache\.reset\(\)"):
        decode(model, cache, turn)
    cache.reset()
    fresh = decode(model, SparseBudgetCache(**SMALL), turn)
    assert torch.equal(decode(model, cache, turn).sequences, fresh.sequences)


def test_another_batch_size_is_refused() -> None:
    cache, text = used()
    with pytest.raises(ValueError, match=r"holds a batch of 1 but got 2 rows; call cache\.reset"):
        drive(small_llama(), cache, torch.cat([text, text]), None, [1], start=69)

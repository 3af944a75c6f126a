"""Invariant 3: a row of a padded batch gives what it gives alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from sparse_cache import SparseBudgetCache

from .driving import LARGE, POLICIES, SMALL, decode, drive, left_padded, small_llama, tokens
from .oracle import dense_logits

TOLERANCE = 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_generate_in_a_batch_and_alone(policy: str, attention: str) -> None:
    """Prompts longer than budget + interval, between the two, and shorter than window + sinks."""
    model = small_llama(attention=attention)
    lengths = [50, 25, 21, 12, 3]
    ids, real = left_padded(lengths)
    together = decode(
        model, SparseBudgetCache(**SMALL, policy=policy), ids, attention_mask=real, new_tokens=40
    )
    for row, length in enumerate(lengths):
        cache = SparseBudgetCache(**SMALL, policy=policy)
        alone = decode(model, cache, ids[row : row + 1, 50 - length :], new_tokens=40)
        assert torch.equal(alone.sequences[0, length:], together.sequences[row, 50:])
        for mine, batched in zip(alone.logits, together.logits, strict=True):
            assert (mine[0] - batched[row]).abs().max().item() < TOLERANCE * 10


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_does_not_depend_on_the_other_rows_tokens(policy: str) -> None:
    model = small_llama()
    ids, real = left_padded([40, 18])
    other = ids.clone()
    other[0] = tokens(1, 40, seed=9)
    first, second = (SparseBudgetCache(**SMALL, policy=policy) for _ in range(2))
    with torch.no_grad():
        a, b = drive(model, first, ids, real), drive(model, second, other, real)
    assert torch.equal(a[1], b[1])
    for mine, theirs in zip(first.layers, second.layers, strict=True):
        assert torch.equal(mine.keys[1, :, :18], theirs.keys[1, :, :18])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [20, 200])
def test_second_turn_with_padding_in_the_middle(policy: str, budget: int) -> None:
    """Row 0 ended its first answer early: the second turn masks the filler behind it.

    The first turn computed the filler as real tokens, which nobody can take back where it made the
    row evict; until then row 0 goes on as if the filler had never been there.
    """
    model = small_llama()
    ids, real = left_padded([40, 27])
    settings = {**SMALL, "budget": budget}
    cache = SparseBudgetCache(**settings, policy=policy)
    answer = decode(model, cache, ids, attention_mask=real, new_tokens=4).sequences
    turn = torch.cat([answer, tokens(2, 9, seed=3)], dim=1)
    mask = torch.cat([real, torch.ones(2, 13, dtype=torch.long)], dim=1)
    mask[0, 42:44] = 0
    mask[1, 44:47] = 0
    output = decode(model, cache, turn, attention_mask=mask, new_tokens=25)
    if budget == 200:
        dense = decode(model, DynamicCache(), turn, attention_mask=mask, new_tokens=25)
        assert torch.equal(dense.sequences, output.sequences)
        for a, b in zip(dense.logits, output.logits, strict=True):
            assert (a - b).abs().max().item() < TOLERANCE * 10
    # Row 1's padding came and went within one chunk: it goes as alone, without the padding.
    alone = SparseBudgetCache(**settings, policy=policy)
    decode(model, alone, ids[1:, 13:], new_tokens=4)
    own = turn[1:, mask[1].bool()]
    single = decode(model, alone, own, new_tokens=25)
    assert torch.equal(single.sequences[0, own.shape[1] :], output.sequences[1, turn.shape[1] :])
    for a, b in zip(single.logits, output.logits, strict=True):
        assert (a[0] - b[1]).abs().max().item() < TOLERANCE * 10


@pytest.mark.parametrize("new", [1, 2, 5])
@pytest.mark.parametrize("hidden", [1, 3])
def test_filler_seen_as_real_is_forgotten_when_a_mask_hides_it(new: int, hidden: int) -> None:
    model = small_llama()
    ids, real = left_padded([30, 22])
    ids = torch.cat([ids, tokens(2, new + 6, seed=4)], dim=1)
    ones = torch.ones(2, new + 6, dtype=torch.long)
    real = torch.cat([real, ones], dim=1)
    later = real.clone()
    later[0, 30 - hidden : 30] = 0
    results = []
    for cache in (SparseBudgetCache(**LARGE), DynamicCache()):
        drive(model, cache, ids[:, :30], real[:, :30])
        results.append(drive(model, cache, ids, later, [new, *[1] * 6], start=30))
    assert (results[0] - results[1]).abs().max().item() < TOLERANCE * 10


def test_padding_is_never_stored() -> None:
    """The stored keys of a padded row are those of the row alone, in the same order."""
    model = small_llama()
    ids, real = left_padded([38, 9, 26])
    together = SparseBudgetCache(**SMALL, policy="knorm")
    drive(model, together, ids, real)
    for row, length in enumerate([38, 9, 26]):
        alone = SparseBudgetCache(**SMALL, policy="knorm")
        drive(model, alone, ids[row : row + 1, 38 - length :])
        for mine, batched in zip(alone.layers, together.layers, strict=True):
            stored = mine.lengths[0]
            assert batched.lengths[row] == stored == min(length, 20)
            gap = mine.keys[0] - batched.keys[row, :, :stored]
            assert gap.abs().max().item() < 1e-5
            gap = mine.values[0] - batched.values[row, :, :stored]
            assert gap.abs().max().item() < 1e-5


def test_a_row_whose_first_chunks_are_all_padding() -> None:
    model = small_llama()
    ids, real = left_padded([40, 5])
    cache = SparseBudgetCache(**SMALL, record=True)
    logits = drive(model, cache, ids, real, [10, 10, 10, 10])
    assert cache.layers[0].lengths == [20, 5]
    truth = dense_logits(model, ids, real, cache.trace().deaths)
    assert (logits - truth)[real.bool()].abs().max().item() < TOLERANCE * 10

"""Invariant 8: every verb of a cache is right or refused; all that a layer owns moves together."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from sparse_cache import SparseBudgetCache, UnsupportedModelError

from .driving import LARGE, POLICIES, SMALL, decode, drive, left_padded, small_llama, tokens

LENGTHS = [44, 26, 22, 5]


def filled(policy: str = "rkv", steps: int = 3) -> tuple[SparseBudgetCache, torch.Tensor]:
    """A cache of rows in different states, and the mask of what it has seen."""
    model = small_llama()
    ids, real = left_padded(LENGTHS)
    ids = torch.cat([ids, tokens(4, steps, seed=1)], dim=1)
    real = torch.cat([real, torch.ones(4, steps, dtype=torch.long)], dim=1)
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True)
    drive(model, cache, ids, real, [44, *[1] * steps])
    return cache, real


def go_on(
    cache: SparseBudgetCache, real: torch.Tensor, sources: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Decode 14 tokens; row `r` is given the tokens of row `sources[r]`. Logits and deaths."""
    seen = cache.get_seq_length()
    ids = torch.zeros(len(sources), seen + 14, dtype=torch.long)
    ids[:, seen:] = tokens(4, 14, seed=2)[sources]
    mask = torch.cat([real[sources], torch.ones(len(sources), 14, dtype=torch.long)], dim=1)
    logits = drive(small_llama(), cache, ids, mask, [1] * 14, start=seen)
    return logits, cache.trace().deaths


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("verb", "sources"),
    [
        (lambda c: c.reorder_cache(torch.tensor([3, 0, 0, 1])), [3, 0, 0, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([False, True, False, True])), [1, 3]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (lambda c: [layer.offload() for layer in c.layers], [0, 1, 2, 3]),
        (
            lambda c: [(x.offload(), x.prefetch()) for x in c.layers],
            [0, 1, 2, 3],
        ),
    ],
    ids=["reorder", "select", "select_bool", "repeat", "offload", "prefetch"],
)
def test_rows_take_everything_along(
    policy: str, verb: Callable[[SparseBudgetCache], object], sources: list[int]
) -> None:
    cache, real = filled(policy)
    expected, deaths = go_on(copy.deepcopy(cache), real, [0, 1, 2, 3])
    verb(cache)
    logits, moved = go_on(cache, real, sources)
    assert (logits - expected[sources]).abs().max().item() < 1e-4
    for mine, before in zip(moved, deaths, strict=True):
        assert torch.equal(mine, before[sources])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_equal_and_apart(
    policy: str, clone: Callable[[SparseBudgetCache], SparseBudgetCache]
) -> None:
    cache, real = filled(policy)
    first, second = clone(cache), clone(cache)
    first.reorder_cache(torch.tensor([3, 2, 1, 0]))
    go_on(first, real, [3, 2, 1, 0])  # does not disturb the others
    a, deaths_a = go_on(second, real, [0, 1, 2, 3])
    b, deaths_b = go_on(cache, real, [0, 1, 2, 3])
    assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(deaths_a, deaths_b, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_reset_makes_it_new(policy: str) -> None:
    cache, _ = filled(policy)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats().bytes_held == cache.stats().evictions == cache.stats().tokens_seen == 0
    with pytest.raises(ValueError, match="no tokens yet"):
        cache.trace()
    model, ids = small_llama(), tokens(2, 60)
    fresh = SparseBudgetCache(**SMALL, policy=policy, record=True)
    a = drive(model, cache, ids, None, [40, *[1] * 20])
    b = drive(model, fresh, ids, None, [40, *[1] * 20])
    assert torch.equal(a, b)
    assert cache.stats() == fresh.stats()


@pytest.mark.parametrize("policy", POLICIES)
def test_crop_without_eviction_is_exact_or_refused(policy: str) -> None:
    model, ids = small_llama(), tokens(1, 40)
    cache = SparseBudgetCache(**LARGE, policy=policy)
    drive(model, cache, ids[:, :30])
    before = drive(model, copy.deepcopy(cache), ids[:, :40], None, [1] * 10, start=30)
    drive(model, cache, tokens(1, 36, seed=5), None, [1, 5], start=30)
    cache.crop(0)
    if policy == "h2o":
        # Its accumulated attention cannot be taken back; a refusal would be right as well.
        try:
            cache.crop(-6)
        except UnsupportedModelError:
            return
    else:
        cache.crop(-6)
    assert cache.get_seq_length() == 30
    after = drive(model, cache, ids[:, :40], None, [1] * 10, start=30)
    assert (before - after).abs().max().item() < 1e-5


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "h2o"])
@pytest.mark.parametrize("taken_back", [1, 3, 7])
def test_recorded_past_is_taken_back_exactly(policy: str, taken_back: int) -> None:
    """Chunks of which the end is rejected leave no trace, also across evictions."""
    model, ids = small_llama(), tokens(1, 90)
    plain = SparseBudgetCache(**SMALL, policy=policy, record=True)
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True)
    drive(model, plain, ids[:, :30])
    drive(model, cache, ids[:, :30])
    cache.activate_past_recording()
    assert cache.is_croppable
    for start in range(30, 84, 2):
        wrong = torch.cat([ids[:, : start + 2], tokens(1, taken_back, seed=start)], dim=1)
        got = drive(model, cache, wrong, None, [2 + taken_back], start=start)
        cache.crop(-taken_back)
        expected = drive(model, plain, ids[:, : start + 2], None, [2], start=start)
        assert (got[:, :2] - expected).abs().max().item() < 1e-4
        assert cache.get_seq_length() == start + 2
        assert cache.layers[0].lengths == plain.layers[0].lengths
    for a, b in zip(plain.trace().deaths, cache.trace().deaths, strict=True):
        assert torch.equal(a, b)


def test_crop_after_eviction_is_refused() -> None:
    cache, _ = filled()
    assert not cache.is_croppable
    with pytest.raises(UnsupportedModelError, match=r"crop\(-2\) cannot be exact"):
        cache.crop(-2)
    with pytest.raises(ValueError, match=r"crop\(-99\) removes more tokens than the 47 seen"):
        cache.crop(-99)
    with pytest.raises(ValueError, match=r"crop\(5\): pass minus"):
        cache.crop(5)


def test_accumulated_attention_cannot_be_recorded() -> None:
    cache, _ = filled("h2o")
    with pytest.raises(UnsupportedModelError, match="policy='h2o' accumulates attention"):
        cache.activate_past_recording()


def test_any_number_of_tokens_may_be_seen() -> None:
    cache, _ = filled()
    assert cache.get_max_length() == -1
    assert all(layer.get_max_length() == -1 for layer in cache.layers)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_numbers_add_up(policy: str) -> None:
    cache, real = filled(policy)
    stats = cache.stats()
    assert stats.tokens_seen == 47
    assert (stats.budgeted_layers, stats.other_layers) == (2, 0)
    lengths = cache.layers[0].lengths
    assert lengths == [20 + 3, 20 + 3, 20, 5 + 3]  # row 2 got its 25th token last
    seen = real.sum(-1).tolist()
    assert stats.tokens_evicted == 2 * sum(s - n for s, n in zip(seen, lengths, strict=True))
    assert stats.tokens_kept == max(lengths)
    assert stats.bytes_dense == 2 * 2 * 4 * 2 * 47 * 8 * 4
    assert stats.bytes_held == 2 * 2 * 4 * 2 * 25 * 8 * 4
    assert stats.share_of_dense == stats.bytes_held / stats.bytes_dense


def test_an_empty_cache_answers_too() -> None:
    cache = SparseBudgetCache()
    assert cache.stats().share_of_dense == 1.0
    assert "seen=0" in repr(cache)
    cache.reset()
    cache.crop(0)
    assert cache.get_seq_length() == 0


def test_repr_is_one_line_with_the_figures() -> None:
    cache, _ = filled()
    text = repr(cache)
    assert "\n" not in text
    for part in ("budget=20", "policy='rkv'", "interval=5", "seen=47", "kept=23"):
        assert part in text
    assert "stored=[23, 23, 20, 8]" in repr(cache.layers[0])


def test_looking_does_not_change_anything() -> None:
    """Reports may be read between any two steps."""
    model, ids = small_llama(), tokens(1, 50)
    quiet, watched = (SparseBudgetCache(**SMALL, record=True) for _ in range(2))
    a = drive(model, quiet, ids, None, [10] + [1] * 40)
    logits = [drive(model, watched, ids[:, :10])]
    for step in range(10, 50):
        repr(watched), watched.stats(), watched.trace(), watched.layers[0].keys
        logits.append(drive(model, watched, ids[:, : step + 1], None, [1], start=step))
    assert torch.equal(torch.cat(logits, dim=1), a)


def test_a_reset_cache_takes_another_batch() -> None:
    model = small_llama()
    cache = SparseBudgetCache(**SMALL)
    decode(model, cache, tokens(2, 30))
    cache.reset()
    again = decode(model, cache, tokens(3, 12))
    fresh = decode(model, SparseBudgetCache(**SMALL), tokens(3, 12))
    assert torch.equal(again.sequences, fresh.sequences)

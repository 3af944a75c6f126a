"""Invariant 6: the same tokens are kept every time; ties and NaN by rule; padding goes first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sparse_cache import NEVER, EvictionPolicy, PolicyView, SparseBudgetCache

from .driving import POLICIES, SMALL, decode, drive, left_padded, small_llama, tokens


@dataclass(frozen=True)
class Constant(EvictionPolicy):
    """The same score for every token."""

    value: float = 0.0

    def score(self, view: PolicyView) -> torch.Tensor:
        return torch.full(view.keys.shape[:3], self.value)


@dataclass(frozen=True)
class NaNOnEvenPositions(EvictionPolicy):
    """NaN for tokens at even positions, minus infinity for the others."""

    def score(self, view: PolicyView) -> torch.Tensor:
        odd = torch.full(view.keys.shape[:3], float("-inf"))
        return odd.masked_fill(view.positions % 2 == 0, float("nan"))


@dataclass(frozen=True)
class WrongShape(EvictionPolicy):
    """One score too many."""

    def score(self, view: PolicyView) -> torch.Tensor:
        return torch.zeros(*view.keys.shape[:2], view.keys.shape[2] + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_runs_keep_the_same(policy: str) -> None:
    model = small_llama()
    ids, real = left_padded([40, 13])
    caches = [SparseBudgetCache(**SMALL, policy=policy, record=True) for _ in range(2)]
    runs = [decode(model, cache, ids, attention_mask=real) for cache in caches]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, runs[1].logits, strict=True))
    for a, b in zip(*(cache.trace().deaths for cache in caches), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_global_generator_is_left_alone(policy: str) -> None:
    model = small_llama()
    state = torch.get_rng_state()
    drive(model, SparseBudgetCache(**SMALL, policy=policy), tokens(1, 60))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf"), -1e30])
def test_equal_scores_keep_sinks_and_the_most_recent(value: float) -> None:
    model = small_llama()
    ids, real = left_padded([40, 31])
    cache = SparseBudgetCache(**SMALL, policy=Constant(value), record=True)
    drive(model, cache, ids, real)
    for death in cache.trace().deaths:
        for head in range(2):
            alive = (death[:, head] == NEVER).nonzero().tolist()
            assert [c for row, c in alive if row == 0] == [0, 1, *range(22, 40)]
            assert [c for row, c in alive if row == 1] == [9, 10, *range(22, 40)]


def test_nan_scores_go_first() -> None:
    """Budget 20 of 40: 2 sinks, 4 of the window, then odd positions, NaN though they be lowest.

    Minus infinity and NaN both count as the lowest score, so between them the recent stays.
    """
    model = small_llama()
    cache = SparseBudgetCache(**SMALL, policy=NaNOnEvenPositions(), record=True)
    drive(model, cache, tokens(1, 40))
    alive = (cache.trace().deaths[0][0, 0] == NEVER).nonzero().flatten().tolist()
    assert alive == [0, 1, *range(22, 40)]


def test_scores_of_a_wrong_shape_are_refused() -> None:
    model = small_llama()
    with pytest.raises(ValueError, match=r"returned scores of shape \(1, 2, 41\); expected"):
        drive(model, SparseBudgetCache(**SMALL, policy=WrongShape()), tokens(1, 40))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[40, 24], [30, 7], [26, 25, 24]])
def test_padding_never_stays_while_a_token_goes(policy: str, lengths: list[int]) -> None:
    model = small_llama()
    ids, real = left_padded(lengths)
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True)
    drive(model, cache, ids, real)
    for layer, death in zip(cache.layers, cache.trace().deaths, strict=True):
        assert layer.lengths == [20 if n >= 25 else n for n in lengths]
        for row, length in enumerate(lengths):
            alive = death[row] == NEVER
            assert not alive[:, : max(lengths) - length].any()
            assert alive.sum(-1).tolist() == [layer.lengths[row]] * 2

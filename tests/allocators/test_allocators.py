"""What allocators answer, apart from any cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache import (
    BudgetAllocator,
    SparseBudgetCache,
    allocator_names,
    register_allocator,
)
from sparse_cache.allocators import (
    checked_head_counts,
    checked_layer_budgets,
    resolve_allocator,
)
from sparse_cache.allocators.adaptive import AdaptiveAllocator
from sparse_cache.allocators.pyramid import PyramidAllocator
from sparse_cache.allocators.uniform import UniformAllocator


def test_names_and_papers() -> None:
    assert {"adaptive", "pyramid", "uniform"} <= set(allocator_names())
    for name in allocator_names():
        allocator = resolve_allocator(name)
        assert allocator.name == name
        assert resolve_allocator(allocator) is allocator
        assert name == "uniform" or allocator.paper.startswith("https://")
        assert type(allocator)(**allocator.options()) == allocator


@given(
    layers=st.integers(1, 80),
    spare=st.integers(0, 2000),
    protected=st.integers(1, 40),
    beta=st.floats(1, 100),
)
@settings(deadline=None)
def test_pyramid_falls_and_adds_up(layers: int, spare: int, protected: int, beta: float) -> None:
    budget = protected + spare
    allocator = PyramidAllocator(beta=beta)
    budgets = checked_layer_budgets(allocator, budget, layers, protected)
    assert sum(budgets) == layers * budget
    assert min(budgets) >= protected
    assert budgets == sorted(budgets, reverse=True)
    if layers > 1:
        assert abs(budgets[-1] - protected - spare / beta) <= 1
        steps = [a - b for a, b in itertools.pairwise(budgets)]
        assert max(steps) - min(steps) <= 2  # a line, up to rounding


def test_pyramid_with_beta_1_is_uniform() -> None:
    assert PyramidAllocator(beta=1).layer_budgets(100, 7, 12) == [100] * 7


def test_pyramid_of_a_share() -> None:
    shares = checked_layer_budgets(PyramidAllocator(beta=4), 0.4, 5, 12)
    assert shares == pytest.approx([0.7, 0.55, 0.4, 0.25, 0.1])
    assert PyramidAllocator().layer_budgets(0.3, 1, 12) == [pytest.approx(0.3)]


def ranked(scores: list[list[float]], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of heads, each head's scores to the right."""
    places = max(lengths)
    padded = [[-torch.inf] * (places - len(row)) + row for row in scores]
    return torch.tensor([padded]), torch.tensor([lengths])


def test_adaptive_takes_the_best_of_all_heads() -> None:
    scores, lengths = ranked([[0.1, 0.2, 0.3, 0.4], [9.0, 8.0, 7.0, 6.0]], [4, 4])
    counts = AdaptiveAllocator(floor=0).head_counts(scores, lengths, 2)
    assert counts.tolist() == [[0, 4]]
    counts = AdaptiveAllocator(floor=0.5).head_counts(scores, lengths, 2)
    assert counts.tolist() == [[1, 3]]
    assert AdaptiveAllocator(floor=1).head_counts(scores, lengths, 2).tolist() == [[2, 2]]


def test_adaptive_with_equal_scores_is_fair() -> None:
    scores, lengths = ranked([[1.0] * 8] * 4, [8] * 4)
    assert AdaptiveAllocator(floor=0).head_counts(scores, lengths, 3).tolist() == [[3] * 4]


def test_adaptive_never_counts_what_a_head_does_not_have() -> None:
    scores, lengths = ranked([[1.0], [0.0] * 9], [1, 9])
    assert AdaptiveAllocator(floor=1).head_counts(scores, lengths, 4).tolist() == [[1, 7]]


def by_hand(scores: list[list[float]], protected: int, floor: int, total: int) -> list[int]:
    """Token by token: what must stay, then each head's floor, then one after another."""
    taken = [set(range(len(row) - protected, len(row))) for row in scores]
    for own, row in zip(taken, scores, strict=True):
        best = sorted(set(range(len(row))) - own, key=lambda i: (-row[i], -i))
        own.update(best[: max(floor - protected, 0)])
    left = [
        (-row[i], len(row) - i, head, i)
        for head, row in enumerate(scores)
        for i in range(len(row))
        if i not in taken[head]
    ]
    for _, _, head, i in sorted(left)[: total - sum(map(len, taken))]:
        taken[head].add(i)
    return [len(own) for own in taken]


@given(data=st.data(), heads=st.integers(1, 5), protected=st.integers(1, 3))
@settings(deadline=None)
def test_adaptive_against_counting_by_hand(data: st.DataObject, heads: int, protected: int) -> None:
    lengths = data.draw(
        st.lists(st.integers(protected, 12), min_size=heads, max_size=heads), label="lengths"
    )
    keep = data.draw(st.integers(protected, sum(lengths) // heads), label="keep")
    number = st.integers(0, 4).map(float)
    scores = [data.draw(st.lists(number, min_size=length, max_size=length)) for length in lengths]
    floor = data.draw(st.integers(0, min(keep, *lengths)), label="floor")
    padded, tensor = ranked(scores, lengths)
    padded[..., -protected:] = torch.inf
    allocator = AdaptiveAllocator(floor=floor / keep)
    counts = checked_head_counts(allocator, padded, tensor, keep)
    assert counts == [by_hand(scores, protected, floor, heads * keep)]


def test_rows_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 3, 20, generator=generator)
    lengths = torch.full((5, 3), 20)
    allocator = AdaptiveAllocator()
    together = allocator.head_counts(scores, lengths, 7)
    for row in range(5):
        alone = allocator.head_counts(scores[row : row + 1], lengths[:1], 7)
        assert torch.equal(alone[0], together[row])


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PyramidAllocator(beta=0.5), "beta must be a number of at least 1, got 0.5"),
        (lambda: PyramidAllocator(beta="20"), "beta must be"),  # type: ignore[arg-type]
        (lambda: PyramidAllocator(beta=float("inf")), "beta must be"),
        (lambda: AdaptiveAllocator(floor=1.5), r"floor must be a number in \[0, 1\], got 1.5"),
        (lambda: AdaptiveAllocator(floor=True), "floor must be"),
        (lambda: SparseBudgetCache(allocation="pyramids"), "known allocations: adaptive, pyramid"),
        (lambda: SparseBudgetCache(0.7, allocation="pyramid"), "pass a share below 0.513"),
        (lambda: SparseBudgetCache(allocation="adaptive", static=True), "static=False"),
        (lambda: SparseBudgetCache(allocation="pyramid", static=True), "static=False"),
    ],
)
def test_values_that_make_no_sense(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("allocation", [UniformAllocator, 3, None])
def test_no_allocator(allocation: object) -> None:
    with pytest.raises(TypeError, match="must be a name or a BudgetAllocator"):
        SparseBudgetCache(allocation=allocation)  # type: ignore[arg-type]


def test_registering() -> None:
    with pytest.raises(TypeError, match="expects a name"):
        register_allocator("")
    with pytest.raises(TypeError, match="subclass of BudgetAllocator"):
        register_allocator("mine")(int)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is taken by"):
        register_allocator("pyramid")(UniformAllocator)


def test_a_method_without_its_flag_is_refused() -> None:
    with pytest.raises(TypeError, match="varies_by_layer = True"):

        class Forgetful(BudgetAllocator):
            def layer_budgets(self, budget: float, layers: int, protected: int) -> list[float]:
                return [budget] * layers


@dataclass(frozen=True)
class Fixed(BudgetAllocator):
    """Gives what it was made with."""

    varies_by_layer: ClassVar[bool] = True
    shares_heads: ClassVar[bool] = True

    budgets: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    def layer_budgets(self, budget: float, layers: int, protected: int) -> list[float]:
        return list(self.budgets)

    def head_counts(self, scores: torch.Tensor, lengths: torch.Tensor, keep: int) -> torch.Tensor:
        return torch.tensor([self.counts])


@pytest.mark.parametrize(
    ("budgets", "budget", "message"),
    [
        ((10, 10), 10, "2 budgets for 3"),
        ((10, 11, 12), 10, "gave 33 tokens to 3 layers; a budget of 10 is 30"),
        ((20, 8, 2), 10, "only 2 of the 5 tokens"),
        ((10.0, 10.0, 10.0), 10, "whole numbers"),
        ((0.5, 0.5, 1.0), 0.5, "between 0 and 1"),
        ((0.5, 0.5, 0.4), 0.5, "mean"),
    ],
)
def test_layer_budgets_that_break_the_promise(
    budgets: tuple[float, ...], budget: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        checked_layer_budgets(Fixed(budgets=budgets), budget, 3, 5)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((2, 2, 2), "one count for each of"),
        ((3, 2), "shared 5 tokens among 2 heads, not 2 each"),
        ((0, 4), "keep 0 tokens; it has 4, of which 1 are always kept"),
        ((5, -1), "lets a head keep 5 tokens; it has 4"),
    ],
)
def test_head_counts_that_break_the_promise(counts: tuple[int, ...], message: str) -> None:
    scores, lengths = ranked([[1.0, 2.0, 3.0, torch.inf]] * 2, [4, 4])
    with pytest.raises(ValueError, match=message):
        checked_head_counts(Fixed(counts=counts), scores, lengths, 2)

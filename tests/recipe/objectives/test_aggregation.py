"""Coefficients of tokens: batches with rejected rows, cut anywhere, and the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.recipe.objectives import (
    AGGREGATIONS,
    clipped_surrogate,
    correct,
    token_coefficients,
)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), aggregation=st.sampled_from(AGGREGATIONS))
def test_against_a_loop(seed: int, aggregation: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Any tokens may have left, not only those at the end.
    mask = torch.rand(5, 6, generator=generator) < torch.rand(5, 1, generator=generator)
    losses = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    found = (losses * token_coefficients(mask, aggregation, longest=9)).sum().item()
    by_row = [[losses[i, j].item() for j in range(6) if mask[i, j]] for i in range(5)]
    by_row = [row for row in by_row if row]
    tokens = sum(len(row) for row in by_row)
    expected = 0.0
    if by_row and aggregation == "sequence":
        expected = sum(sum(row) / len(row) for row in by_row) / len(by_row)
    elif by_row:
        divisor = tokens if aggregation == "token" else 9 * len(by_row)
        expected = sum(map(sum, by_row)) / divisor
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 8),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_accumulated_gradients_are_those_of_the_batch(
    seed: int, size: int, aggregation: str
) -> None:
    """Unequal lengths, rejected rows and rows without a token, in micro-batches of any size."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(7) < torch.randint(0, 8, (8, 1), generator=generator)
    sampled = -torch.rand(8, 7, generator=generator)
    dense = sampled + torch.randn(8, 7, generator=generator)
    correction = correct(dense, sampled, mask, reject_below=0.2)
    advantages = torch.randn(8, generator=generator)
    coefficients = token_coefficients(correction.kept, aggregation, longest=7)
    start = dense + 0.1 * torch.randn(8, 7, generator=generator)

    def gradient(parts: list[torch.Tensor]) -> tuple[float, torch.Tensor]:
        logprobs, loss = start.clone().requires_grad_(), 0.0
        for rows in parts:
            losses = clipped_surrogate(logprobs[rows], dense[rows], advantages[rows]).loss
            losses = losses * correction.weights[rows]
            part = (torch.where(correction.kept[rows], losses, 0.0) * coefficients[rows]).sum()
            part.backward()
            loss += part.item()
        assert logprobs.grad is not None
        return loss, logprobs.grad

    whole, expected = gradient([torch.arange(8)])
    found, parts = gradient(list(torch.randperm(8, generator=generator).split(size)))
    assert found == pytest.approx(whole, abs=1e-5)
    torch.testing.assert_close(parts, expected, atol=1e-6, rtol=1e-5)
    assert float(expected[~correction.kept].abs().sum()) == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_edges(aggregation: str) -> None:
    one = token_coefficients(torch.tensor([[True, False]]), aggregation, longest=1)
    assert one.tolist() == [[1.0, 0.0]]
    assert one.dtype == torch.float32
    for shape in ((0, 3), (3, 0), (2, 3)):
        found = token_coefficients(torch.zeros(shape).bool(), aggregation, longest=4)
        assert found.shape == shape
        assert not bool(found.any())
    with pytest.raises(ValueError, match="longest=0 must be at least 1"):
        token_coefficients(torch.ones(1, 1).bool(), aggregation, longest=0)

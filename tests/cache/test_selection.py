"""The small pure parts: choosing, attention mass, query window, storage, chunks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache import UnsupportedModelError
from sparse_cache.attention_mass import QUERY_BLOCK, attention_mass
from sparse_cache.chunk import Chunk
from sparse_cache.query_window import QueryWindow
from sparse_cache.selection import select_kept

SCORES = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 3e38])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_select_kept_is_a_sort_by_hand(data: st.DataObject) -> None:
    window, sinks = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    stored = data.draw(st.integers(window + sinks, 24))
    keep = data.draw(st.integers(window + sinks, stored))
    scores = data.draw(st.lists(SCORES, min_size=stored, max_size=stored))
    first = data.draw(st.integers(0, 3))
    positions = torch.arange(stored).clone()
    positions[first:] += data.draw(st.integers(0, 5))

    def rank(slot: int) -> tuple[bool, float, int]:
        protected = slot >= stored - window or int(positions[slot]) < sinks
        score = scores[slot]
        finite = -math.inf if math.isnan(score) else max(min(score, 3.4028234e38), -3.4028234e38)
        return protected, max(finite, -3.4028234e38), slot

    expected = sorted(sorted(range(stored), key=rank, reverse=True)[:keep])
    kept = select_kept(
        torch.tensor(scores).view(1, 1, -1),
        keep=keep,
        window=window,
        sinks=sinks,
        positions=positions.view(1, 1, -1),
    )
    assert kept.flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_select_kept_leaves_its_arguments_alone(dtype: torch.dtype) -> None:
    scores, positions = torch.randn(2, 3, 12).to(dtype), torch.arange(12).expand(2, 3, -1).clone()
    before = scores.clone(), positions.clone()
    select_kept(scores, keep=6, window=2, sinks=1, positions=positions)
    assert torch.equal(scores, before[0])
    assert torch.equal(positions, before[1])


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    chunk=st.integers(1, 9),
    stored=st.integers(0, 9),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    kind=st.sampled_from(["none", "boolean", "additive"]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    with_padding=st.booleans(),
)
def test_attention_mass_is_a_loop(
    chunk: int,
    stored: int,
    heads: int,
    group: int,
    kind: str,
    softcap: float | None,
    with_sinks: bool,
    with_padding: bool,
) -> None:
    generator = torch.Generator().manual_seed(chunk * 100 + stored)
    batch, size, length = 2, 4, stored + chunk
    query = torch.randn(batch, heads * group, chunk, size, generator=generator)
    key = torch.randn(batch, heads, length, size, generator=generator)
    sinks = torch.randn(heads * group, generator=generator) if with_sinks else None
    visible = torch.ones(chunk, length).tril(stored).bool().expand(batch, 1, -1, -1).clone()
    if kind != "none":
        visible &= torch.rand(batch, 1, chunk, length, generator=generator) < 0.7
    mask = None if kind == "none" else visible
    if kind == "additive":
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    real = torch.rand(batch, chunk, generator=generator) < 0.6 if with_padding else None
    mass = attention_mass(
        query, key, mask, scaling=0.3, softcap=softcap, sinks=sinks, real_queries=real
    )
    expected = torch.zeros(batch, heads, length)
    for b in range(batch):
        for h in range(heads * group):
            for t in range(chunk):
                if real is not None and not real[b, t]:
                    continue
                weights = {}
                for s in range(length):
                    if visible[b, 0, t, s]:
                        logit = 0.3 * float(query[b, h, t] @ key[b, h // group, s])
                        weights[s] = softcap * math.tanh(logit / softcap) if softcap else logit
                total = sum(math.exp(w) for w in weights.values())
                total += math.exp(float(sinks[h])) if sinks is not None else 0.0
                for s, weight in weights.items():
                    expected[b, h // group, s] += math.exp(weight) / total / group
    assert torch.allclose(mass, expected, atol=1e-5)


def test_attention_mass_in_blocks_is_that_in_one_go() -> None:
    chunk = QUERY_BLOCK + 37
    query, key = torch.randn(1, 2, chunk, 4), torch.randn(1, 1, chunk + 5, 4)
    whole = torch.softmax(
        (query @ key.transpose(-1, -2) * 0.5).masked_fill(
            ~torch.ones(chunk, chunk + 5).tril(5).bool(), float("-inf")
        ),
        dim=-1,
    )
    mass = attention_mass(query, key, None, scaling=0.5)
    assert torch.allclose(mass, whole.sum(2).mean(1, keepdim=True), atol=1e-4)
    assert mass.sum().item() == pytest.approx(chunk, rel=1e-5)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    size=st.integers(1, 6),
    chunks=st.lists(
        st.integers(1, 9).flatmap(
            lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), min_size=2, max_size=2))
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_query_window_holds_the_last_real_queries(
    size: int, chunks: list[tuple[int, list[int]]]
) -> None:
    window, truth, number = QueryWindow(size), [[0.0] * size, [0.0] * size], 1.0
    for length, real in chunks:
        queries = torch.arange(number, number + 2 * length).view(2, 1, length, 1)
        number += 2 * length
        all_real = real == [length, length]
        window.append(queries, None if all_real else real)
        for row, count in enumerate(real):
            new = queries[row, 0, length - count :, 0].tolist()
            truth[row] = (truth[row] + new)[-size:]
    assert window.data is not None
    assert window.data[:, 0, :, 0].tolist() == truth


def test_a_query_window_does_not_keep_the_chunk_alive() -> None:
    window = QueryWindow(3)
    window.append(torch.zeros(1, 2, 1000, 4), None)
    assert window.data.untyped_storage().nbytes() == 3 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("mask", "start", "real", "seen", "expected", "hides"),
    [
        (None, 0, [], None, None, False),
        ([[1, 1, 1]], 0, [], None, None, False),
        ([[0, 1, 1], [1, 1, 1]], 0, [], None, [2, 3], False),
        ([[0, 1, 1, 1], [1, 1, 0, 1]], 2, [1, 2], [[0, 1], [1, 1]], [2, 1], False),
        ([[0, 1, 1, 0], [1, 1, 1, 1]], 3, [2, 3], [[0, 1, 1], [1, 1, 1]], [0, 1], False),
        ([[1, 0, 1], [1, 1, 1]], 2, [1, 2], [[0, 1], [1, 1]], None, False),  # one token: by count
        ([[1, 0, 1, 1], [1, 1, 1, 1]], 2, [1, 2], [[0, 1], [1, 1]], None, True),
        ([[1, 0, 1], [1, 1, 1]], 2, [2, 2], None, None, True),
    ],
)
def test_a_chunk_counts_its_real_tokens(
    mask: list[list[int]] | None,
    start: int,
    real: list[int],
    seen: list[list[int]] | None,
    expected: list[int] | None,
    hides: bool,
) -> None:
    tensor = None if mask is None else torch.tensor(mask)
    length = 3 if tensor is None else tensor.shape[1] - start
    seen_mask = None if seen is None else torch.tensor(seen, dtype=torch.bool)
    chunk = Chunk.from_attention_mask(tensor, start, length, real, seen_mask)
    assert chunk.real == expected
    assert (chunk.seen_mask is not None) == hides


def test_a_chunk_moves_padding_to_the_front() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 1, 1, 1]])
    chunk = Chunk.from_attention_mask(mask, 0, 5, [], None)
    assert chunk.padding_first is not None
    assert chunk.padding_first.tolist() == [[1, 3, 0, 2, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("mask", "start", "length", "words"),
    [
        ([[1, 1, 0]], 0, 3, "pad on the left"),
        ([[1, 1, 1, 1]], 0, 3, "covers 4 tokens"),
        ([[1, 1, 1]], 3, 3, "seen 3 before"),
    ],
)
def test_a_chunk_refuses(mask: list[list[int]], start: int, length: int, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        Chunk.from_attention_mask(torch.tensor(mask), start, length, [start] if start else [], None)

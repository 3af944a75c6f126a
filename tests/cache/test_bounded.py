"""Invariant 2: storage is bounded, allocated once, and one layer at a time is dense."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache import SparseBudgetCache

from .driving import POLICIES, SMALL, drive, left_padded, small_llama, tokens


def pointers(cache: SparseBudgetCache) -> list[int]:
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [[30], [3], [40, 11, 2]])
def test_memory_is_constant_while_decoding(policy: str, lengths: list[int]) -> None:
    model = small_llama()
    ids, real = left_padded(lengths)
    cache = SparseBudgetCache(**SMALL, policy=policy)
    drive(model, cache, ids, real)
    where, held = pointers(cache), cache.stats().bytes_held
    width = ids.shape[1]
    ids = torch.cat([ids, tokens(len(lengths), 60, seed=1)], dim=1)
    real = torch.cat([real, torch.ones(len(lengths), 60, dtype=torch.long)], dim=1)
    for step in range(width, width + 60):
        drive(model, cache, ids[:, : step + 1], real[:, : step + 1], [1], start=step)
        for layer in cache.layers:
            assert max(layer.lengths) <= 20 + 5
            assert layer.keys.shape[2] == max(layer.lengths)
        assert pointers(cache) == where
        assert cache.stats().bytes_held == held
    # layers * (keys and values) * rows * heads * (budget + interval) * head size * bytes
    assert held == 2 * 2 * len(lengths) * 2 * 25 * 8 * 4
    bookkeeping = cache.stats().bytes_bookkeeping
    drive(model, cache, torch.cat([ids, ids[:, :1]], 1), None, [1], start=ids.shape[1])
    assert cache.stats().bytes_bookkeeping <= bookkeeping + 8 * len(lengths) * 2


def test_a_generous_budget_costs_nothing_until_it_is_used() -> None:
    model = small_llama()
    cache = SparseBudgetCache(budget=10_000_000)
    drive(model, cache, tokens(1, 30))
    assert cache.stats().bytes_held < 10_000 * cache.stats().bytes_dense // 30


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    budget=st.integers(6, 20),
    interval=st.integers(1, 12),
    chunk=st.integers(1, 40),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    policy=st.sampled_from(POLICIES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_between_calls_a_row_holds_less_than_budget_and_interval(
    budget: int,
    interval: int,
    chunk: int,
    lengths: list[int],
    policy: str,
    dtype: torch.dtype,
) -> None:
    model = small_llama(dtype=dtype)
    ids, real = left_padded(lengths)
    cache = SparseBudgetCache(budget, interval=interval, window=4, sinks=2, policy=policy)
    for start in range(0, ids.shape[1], chunk):
        size = min(chunk, ids.shape[1] - start)
        stop = start + size
        drive(model, cache, ids[:, :stop], real[:, :stop], [size], start=start)
        for layer in cache.layers:
            assert max(layer.lengths) < budget + interval
            assert layer.keys.dtype == dtype
            assert layer.keys.untyped_storage().nbytes() == (
                len(lengths) * 2 * (budget + interval) * 8 * dtype.itemsize
            )
    assert cache.stats().tokens_kept < budget + interval


class Watcher(SparseBudgetCache):
    """Counts, at every update, the live tensors with more than `limit` tokens of earlier layers."""

    limit = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: list[tuple[int, weakref.ref[Any]]] = []
        self.dense_layers: list[int] = []

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *a: Any, **k: Any) -> Any:
        gc.collect()
        alive = {index for index, storage in self.given if storage() is not None}
        self.dense_layers.append(len(alive - {layer_idx}))
        out = super().update(key_states, value_states, layer_idx, *a, **k)
        for tensor in (key_states, value_states, *out):
            self.given.append((layer_idx, weakref.ref(tensor)))
        return out


@pytest.mark.parametrize("policy", ["rkv", "h2o", "streaming"])
@pytest.mark.parametrize("chunks", [[200], [100, 100]])
def test_at_prefill_one_layer_is_dense_at_a_time(policy: str, chunks: list[int]) -> None:
    """When a layer takes its chunk in, the dense tensors of all earlier layers are gone."""
    model = small_llama(layers=4)
    cache = Watcher(**SMALL, policy=policy)
    drive(model, cache, tokens(1, 200), None, chunks)
    assert len(cache.dense_layers) == 4 * len(chunks)
    assert max(cache.dense_layers) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_eviction_while_decoding_copies_less_than_the_layer(policy: str) -> None:
    """The largest tensor made by a step that evicts, apart from a policy's own scoring, is smaller
    than what all layers hold: eviction goes layer by layer, tensor by tensor."""
    model = small_llama(layers=6)
    cache = SparseBudgetCache(**SMALL, policy=policy)
    ids = tokens(1, 60)
    drive(model, cache, ids[:, :20])
    held = cache.stats().bytes_held
    for step in range(20, 60):
        drive(model, cache, ids[:, : step + 1], None, [1], start=step)
        assert cache.stats().bytes_held == held
        resident = sum(
            layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
            for layer in cache.layers
        )
        assert resident == held
    assert cache.stats().evictions == 6 * 8

"""Invariant 4: positions are those of the sequence, whatever was evicted."""

from __future__ import annotations

import pytest
import torch

from sparse_cache import SparseBudgetCache

from .driving import POLICIES, SMALL, decode, drive, left_padded, small_llama, tokens


class PositionWatcher:
    """Notes the position ids that reach the rotary embedding."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen: list[torch.Tensor] = []
        self.handle = model.model.rotary_emb.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        self.seen.append(positions.clone())

    def __enter__(self) -> PositionWatcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.handle.remove()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sequence_length_is_what_was_seen(policy: str) -> None:
    model = small_llama()
    ids = tokens(1, 50)
    cache = SparseBudgetCache(**SMALL, policy=policy)
    assert cache.get_seq_length() == 0
    seen = 0
    for chunk in (30, 1, 7, 1, 1, 10):
        drive(model, cache, ids[:, : seen + chunk], None, [chunk], start=seen)
        seen += chunk
        assert cache.get_seq_length() == cache.get_seq_length(1) == seen
        assert cache.stats().tokens_seen == seen


def test_generate_counts_on() -> None:
    model = small_llama()
    ids, real = left_padded([40, 13])
    with PositionWatcher(model) as watcher:
        decode(model, SparseBudgetCache(**SMALL), ids, attention_mask=real, new_tokens=20)
    assert len(watcher.seen) == 20
    for step, positions in enumerate(watcher.seen[1:]):
        assert positions.tolist() == [[40 + step], [13 + step]]


def test_a_forward_without_positions_or_mask_counts_on() -> None:
    model = small_llama()
    ids = tokens(1, 60)
    cache = SparseBudgetCache(**SMALL)
    with PositionWatcher(model) as watcher:
        drive(model, cache, ids, None, [45, 1, 1, 5, 1, 7])
    assert [p.flatten().tolist() for p in watcher.seen] == [
        list(range(45)),
        [45],
        [46],
        list(range(47, 52)),
        [52],
        list(range(53, 60)),
    ]


@pytest.mark.parametrize("policy", ["streaming", "knorm", "rkv"])
def test_stored_keys_keep_the_rotation_they_came_with(policy: str) -> None:
    """Keys of layer 0 depend on token and position alone, so each stored one can be recomputed."""
    model = small_llama()
    ids = tokens(1, 60)
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True)
    drive(model, cache, ids, None, [50, *[1] * 10])
    dense = SparseBudgetCache(budget=500)
    drive(model, dense, ids)
    deaths = cache.trace().deaths[0]
    alive = deaths[0] > 60
    for head in range(2):
        expected = dense.layers[0].keys[0, head, alive[head]]
        assert (cache.layers[0].keys[0, head] - expected).abs().max().item() < 1e-5
        expected = dense.layers[0].values[0, head, alive[head]]
        assert (cache.layers[0].values[0, head] - expected).abs().max().item() < 1e-5

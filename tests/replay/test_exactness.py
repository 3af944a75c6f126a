"""One replayed forward gives the log-probabilities that the rollout was sampled from."""

from __future__ import annotations

import pytest
import torch

from sparse_cache import EvictionTrace, SparseBudgetCache
from sparse_cache.replay import replay
from tests.cache.driving import POLICIES, SMALL, decode, drive, left_padded, small_llama, tokens

from .rollouts import Rollout, gap, replayed, rollout

WAYS = ("dense", "flex", "gather")
EXACT = 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
@torch.no_grad()
def test_every_way_equals_the_sampler(policy: str, attention: str) -> None:
    model = small_llama(attention=attention, layers=3)
    run = rollout(model, policy=policy)
    for way in WAYS:
        assert gap(replayed(model, run, way), run) < EXACT
    dense = model(run.sequences, attention_mask=run.mask).logits
    assert gap(dense, run) > 0.1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("allocation", ["pyramid", "adaptive"])
@torch.no_grad()
def test_ragged_budgets(allocation: str, way: str) -> None:
    model = small_llama(layers=3, kv_heads=3)
    run = rollout(model, policy="keydiff", allocation=allocation)
    kept = [(death > run.trace.tokens_seen).sum(-1) for death in run.trace.deaths]
    assert len({int(count) for layer in kept for count in layer.flatten()}) > 1
    assert gap(replayed(model, run, way), run) < EXACT


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_prompt_in_chunks_and_two_turns(way: str) -> None:
    model = small_llama()
    ids, real = left_padded([50, 31])
    cache = SparseBudgetCache(**SMALL, policy="keydiff", record=True)
    logits = drive(model, cache, ids, real, [7, 20, 1, 22])
    more, more_real = left_padded([12, 5], seed=1)
    ids, real = torch.cat([ids, more], 1), torch.cat([real, more_real], 1)
    logits = torch.cat([logits, drive(model, cache, ids, real, [12], start=50)], 1)
    with replay(model, cache.trace(), way=way):
        whole = model(ids, attention_mask=real).logits
    assert (whole - logits)[real.bool()].abs().max() < 1e-3
    assert (model(ids, attention_mask=real).logits - logits)[real.bool()].abs().max() > 0.1


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_rows_of_a_beam_search(way: str) -> None:
    """Rows that were reordered carry their own history."""
    model = small_llama()
    cache = SparseBudgetCache(**SMALL, policy="rkv", record=True)
    drive(model, cache, tokens(3, 30))
    beams = torch.tensor([2, 0, 0])
    cache.reorder_cache(beams)
    ids = torch.cat([tokens(3, 30)[beams], tokens(3, 12, seed=1)], dim=1)
    logits = drive(model, cache, ids, chunks=[1] * 12, start=30)
    with replay(model, cache.trace(), way=way):
        whole = model(ids).logits[:, 30:]
    assert (whole - logits).abs().max() < 1e-3


@torch.no_grad()
def test_the_rollout_may_go_on_behind_the_end_of_the_text() -> None:
    """The sampler pads a finished row with tokens that it counts; the learner masks them."""
    model = small_llama()
    run = rollout(model)
    run.mask[1, 50:] = 0
    logits = replayed(model, run)
    run.mask[1, 50:] = 1
    expected = replayed(model, run)
    assert torch.equal(logits[:, :50], expected[:, :50])


@torch.no_grad()
def test_without_the_last_token() -> None:
    model = small_llama()
    run = rollout(model)
    with replay(model, run.trace):
        logits = model(run.sequences[:, :-1], attention_mask=run.mask[:, :-1]).logits
    assert torch.allclose(logits, replayed(model, run)[:, :-1], atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_right_padding(way: str) -> None:
    """The learner may pad on the other side, under the trace laid out for that."""
    model = small_llama()
    run = rollout(model)
    length = run.sequences.shape[1]
    counts = run.mask.sum(-1)
    right = (torch.arange(length) < counts[:, None]).long()
    ids = torch.zeros_like(run.sequences)
    ids[right.bool()] = run.sequences[run.mask.bool()]
    with replay(model, run.trace.aligned_to(right), way=way):
        logits = model(ids, attention_mask=right).logits
    back = torch.zeros_like(logits)
    back[run.mask.bool()] = logits[right.bool()]
    assert gap(back, run) < EXACT


@torch.no_grad()
def test_bf16_is_closer_than_the_dense_recomputation() -> None:
    model = small_llama(dtype=torch.bfloat16)
    run = rollout(model)
    dense = model(run.sequences, attention_mask=run.mask).logits
    assert gap(replayed(model, run), run) < 0.2 * gap(dense, run)


@torch.no_grad()
def test_a_wrong_death_shows() -> None:
    """If the trace says that one evicted token lived on, replay is off."""
    model = small_llama()
    run = rollout(model, lengths=(40,), policy="keydiff")
    deaths = [death.clone() for death in run.trace.deaths]
    victim = int((deaths[0][0, 0] < 45).nonzero()[-1])
    deaths[0][0, 0, victim] = 60
    wrong = EvictionTrace(deaths, run.trace.layer_indices, run.trace.tokens_seen)
    for way in WAYS:
        other = Rollout(run.sequences, run.mask, run.prompt_length, run.logits, wrong)
        assert gap(replayed(model, other, way), run) > 10 * EXACT


@torch.no_grad()
def test_nothing_else_changes() -> None:
    """A forward outside of the context, and one of another model inside, are as ever."""
    model, other = small_llama(), small_llama(seed=1)
    run = rollout(model)
    before = model(run.sequences, attention_mask=run.mask).logits
    reference = other(run.sequences, attention_mask=run.mask).logits
    with replay(model, run.trace):
        model(run.sequences, attention_mask=run.mask)
        assert torch.equal(other(run.sequences, attention_mask=run.mask).logits, reference)
    assert torch.equal(model(run.sequences, attention_mask=run.mask).logits, before)
    again = decode(model, SparseBudgetCache(**SMALL), run.sequences[:, :40], new_tokens=5)
    assert again.sequences.shape[1] == 45

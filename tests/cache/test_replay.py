"""Replay: one dense forward under the recorded trace gives the logits of the step-by-step run.

This is the strongest test of the cache: a token evicted a step too early, a value paired with
another key, a wrong position or mask all change the logits.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from sparse_cache import NEVER, SparseBudgetCache

from .cases import Case, cases
from .driving import (
    LARGE,
    POLICIES,
    SMALL,
    Schedule,
    decode,
    drive,
    left_padded,
    small_llama,
    tokens,
)
from .oracle import dense_logits

TOLERANCE = 1e-4


def check_against_oracle(
    model: torch.nn.Module,
    cache: SparseBudgetCache,
    ids: torch.Tensor,
    real: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    truth = dense_logits(model, ids, real, cache.trace().deaths)
    columns = real.bool()
    assert columns.any()
    scale = max(1.0, truth[columns].abs().max().item())
    assert (logits.double() - truth)[columns].abs().max().item() < TOLERANCE * scale


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_generate_is_the_dense_forward_under_its_trace(policy: str, attention: str) -> None:
    model = small_llama(attention=attention)
    ids, real = left_padded([40, 23, 9])
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True)
    output = decode(model, cache, ids, attention_mask=real, new_tokens=35)
    logits = torch.stack(output.logits, dim=1)
    whole = output.sequences[:, :-1]
    real = torch.cat([real, torch.ones(3, 34, dtype=torch.long)], dim=1)
    truth = dense_logits(model, whole, real, cache.trace().deaths)[:, 39:]
    assert (logits.double() - truth).abs().max().item() < TOLERANCE * truth.abs().max().item()
    assert cache.stats().evictions >= 3 * 2 * 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [1, 7, 25])
def test_prefill_in_chunks(policy: str, chunk: int) -> None:
    model = small_llama(layers=3)
    ids, real = left_padded([60, 31])
    cache = SparseBudgetCache(**SMALL, policy=policy, record=True)
    chunks = [chunk] * (60 // chunk) + ([60 % chunk] if 60 % chunk else [])
    logits = drive(model, cache, ids, real, chunks)
    check_against_oracle(model, cache, ids, real, logits)


def test_turns_with_generate() -> None:
    model = small_llama()
    cache = SparseBudgetCache(**SMALL, record=True)
    ids = tokens(2, 30)
    logits = []
    for turn in range(3):
        output = decode(model, cache, ids, new_tokens=12)
        ids = torch.cat([output.sequences, tokens(2, 9, seed=turn + 1)], dim=1)
        logits.append((ids.shape[1] - 9 - 12 - 1, torch.stack(output.logits, dim=1)))
    seen = cache.get_seq_length()
    ones = torch.ones(2, seen, dtype=torch.long)
    truth = dense_logits(model, ids[:, :seen], ones, cache.trace().deaths)
    for start, turn_logits in logits:
        expected = truth[:, start : start + 12]
        assert (turn_logits.double() - expected).abs().max().item() < 1e-3
    assert cache.stats().evictions > 2 * 2 * 3


@pytest.mark.parametrize("budget", [0.05, 0.3, 0.9])
def test_share_of_the_tokens_seen(budget: float) -> None:
    model = small_llama()
    ids, real = left_padded([50, 20])
    cache = SparseBudgetCache(budget, interval=5, window=4, sinks=2, record=True)
    chunks = [30, 8, *[1] * 12]
    check_against_oracle(model, cache, ids, real, drive(model, cache, ids, real, chunks))


def test_a_row_that_is_full_but_drops_nothing() -> None:
    """With a share as budget, a chunk may fill a row to its limit and raise the limit with it."""
    model = small_llama()
    ids, real = left_padded([50, 20])
    cache = SparseBudgetCache(0.9, policy="streaming", interval=5, window=4, sinks=2, record=True)
    chunks = [30, 8, *[1] * 12]
    check_against_oracle(model, cache, ids, real, drive(model, cache, ids, real, chunks))


class BeamWatcher(SparseBudgetCache):
    """Notes the trace before rows move."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.before = self.trace().deaths
        super().reorder_cache(beam_idx)


@pytest.mark.parametrize("policy", ["rkv", "h2o", "knorm"])
@pytest.mark.parametrize("seed", range(3))
def test_beam_search_moves_the_trace_with_the_rows(seed: int, policy: str) -> None:
    """Every beam's score is that of a dense forward under the trace of the row it came from."""
    model = small_llama(seed=seed)
    ids = tokens(1, 33)
    cache = BeamWatcher(**SMALL, policy=policy, record=True)
    output = decode(
        model, cache, ids, new_tokens=20, num_beams=4, num_return_sequences=4, output_scores=True
    )
    # The last step chooses among the rows as they were before it, in an order we are not told.
    assert cache.before[0].shape == (4, 2, 52)
    ones = torch.ones(1, 52, dtype=torch.long)
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        misfits = []
        for row in range(4):
            deaths = [death[row : row + 1] for death in cache.before]
            logits = dense_logits(model, sequence[None, :-1], ones, deaths)[0, 32:]
            own = logits.log_softmax(-1).gather(-1, sequence[33:, None]).sum() / 20
            misfits.append(abs(own.item() - score.item()))
        assert min(misfits) < TOLERANCE


@settings(derandomize=True, deadline=None, max_examples=60)
@given(case=cases())
def test_any_configuration(case: Case) -> None:
    model = small_llama(
        layers=case.layers,
        kv_heads=case.kv_heads,
        group=case.group,
        head_size=case.head_size,
        attention=case.attention,
    )
    real = case.real
    ids = tokens(*real.shape)
    cache = case.cache()
    schedules = [Schedule(cache) for _ in range(len(real))]
    logits, start = [], 0
    for length in case.chunks:
        stop = start + length
        logits.append(drive(model, cache, ids[:, :stop], real[:, :stop], [length], start=start))
        for row, schedule in enumerate(schedules):
            schedule.take(int(real[row, start:stop].sum()))
        start = stop
        for layer in cache.layers:
            assert layer.lengths == [schedule.stored for schedule in schedules]
    together = torch.cat(logits, dim=1)
    check_against_oracle(model, cache, ids, real, together)

    trace = cache.trace()
    evictions = sum(schedule.evictions for schedule in schedules)
    assert cache.stats().evictions == case.layers * evictions
    for death in trace.deaths:
        assert (death[(real == 0)[:, None].expand_as(death)] == 0).all()
        alive = (death == NEVER).sum(-1)
        assert alive.tolist() == [[s.stored] * case.kv_heads for s in schedules]
        for row, schedule in enumerate(schedules):
            mine = death[row][:, real[row].bool()]
            assert (mine[:, schedule.seen - min(case.window, schedule.seen) :] == NEVER).all()
            if cache.settings.policy.keeps_sinks:
                assert (mine[:, : case.sinks] == NEVER).all()

    for row, schedule in enumerate(schedules):
        own = real[row].bool()
        if not schedule.seen:
            continue
        alone = case.cache()
        sizes = [int(part.sum()) for part in real[row].split(case.chunks)]
        single = drive(model, alone, ids[row : row + 1, own], None, [s for s in sizes if s])
        for mine, batched in zip(alone.trace().deaths, trace.deaths, strict=True):
            # Deaths are columns; as many real tokens were seen at that column.
            columns = torch.cat([torch.zeros(1, dtype=torch.long), real[row].cumsum(0)])
            expected = batched[row][:, own].long()
            expected = torch.where(
                expected == NEVER, NEVER, columns[expected.clamp(max=len(columns) - 1)]
            )
            assert torch.equal(mine[0].long(), expected)
        scale = max(1.0, single.abs().max().item())
        assert (single[0] - together[row, own]).abs().max().item() < TOLERANCE * scale


def test_the_oracle_notices_a_wrong_death() -> None:
    """Without eviction the oracle is the dense model; one death more, and it is not."""
    model = small_llama()
    ids, real = left_padded([30, 12])
    cache = SparseBudgetCache(**LARGE, record=True)
    logits = drive(model, cache, ids, real)
    check_against_oracle(model, cache, ids, real, logits)
    deaths = [death.clone() for death in cache.trace().deaths]
    deaths[1][0, 1, 20] = 26
    truth = dense_logits(model, ids, real, deaths)
    gap = (logits.double() - truth).abs().amax(-1)
    assert gap[0, :26].max() < TOLERANCE < 1e-3 < gap[0, 26:].max()

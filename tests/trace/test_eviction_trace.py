"""Traces of real runs, cut, joined and laid out anew, against forwards under them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache import NEVER, EvictionTrace, SparseBudgetCache
from tests.cache.driving import SMALL, drive, left_padded, small_llama, tokens
from tests.cache.oracle import dense_logits

SHIFT = 5


def recorded(
    lengths: tuple[int, ...] = (40, 23, 9), decoded: int = 20, seed: int = 0, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, EvictionTrace]:
    """Token ids, mask, logits and trace of a left-padded batch."""
    ids, real = left_padded(list(lengths), seed)
    ids = torch.cat([ids, tokens(len(lengths), decoded, seed + 1)], dim=1)
    real = torch.cat([real, real.new_ones(len(lengths), decoded)], dim=1)
    cache = SparseBudgetCache(**(SMALL | {"policy": "keydiff"} | options), record=True)
    logits = drive(small_llama(kv_heads=3), cache, ids, real, [lengths[0], *[1] * decoded])
    return ids, real, logits, cache.trace()


def check(
    ids: torch.Tensor, real: torch.Tensor, logits: torch.Tensor, trace: EvictionTrace
) -> None:
    """The logits are those of a dense forward under the trace, where there are tokens."""
    trace.validate()
    truth = dense_logits(small_llama(kv_heads=3), ids, real, trace.deaths)
    columns = real.bool()
    assert (truth - logits)[columns].abs().max() < 1e-4 * truth[columns].abs().max()


def test_what_it_holds() -> None:
    _, real, _, trace = recorded()
    assert trace.batch_size == 3 and trace.tokens_seen == 60
    assert torch.equal(trace.real, real.bool())
    assert trace.nbytes == 2 * 3 * 3 * 60 * 4
    assert "rows=3, tokens_seen=60, layers=2, heads=3" in repr(trace)
    assert int(trace.kept(0, 60).sum(-1).max()) < SMALL["budget"] + SMALL["interval"]


@pytest.mark.parametrize("allocation", ["uniform", "adaptive", "pyramid"])
def test_rows(allocation: str) -> None:
    ids, real, logits, trace = recorded(allocation=allocation)
    check(ids, real, logits, trace)
    rows = [2, 0, 2]
    check(ids[rows], real[rows], logits[rows], trace.select_rows(rows))
    mask = torch.tensor([False, True, False])
    check(ids[mask], real[mask], logits[mask], trace.select_rows(mask))


@pytest.mark.parametrize("side", ["left", "right"])
def test_stacked_rollouts(side: str) -> None:
    runs = [recorded(), recorded((31, 30), decoded=11, seed=3)]
    together = EvictionTrace.stack([run[3] for run in runs], side=side)
    assert together.batch_size == 5 and together.tokens_seen == 60

    def widened(index: int) -> torch.Tensor:
        parts = []
        for run in runs:
            missing = 60 - run[index].shape[1]
            pad = (missing, 0) if side == "left" else (0, missing)
            spread = (0, 0) * (run[index].dim() - 2)
            parts.append(torch.nn.functional.pad(run[index], (*spread, *pad)))
        return torch.cat(parts)

    check(widened(0), widened(1), widened(2), together)


def test_truncated() -> None:
    """The first columns are what a shorter run records."""
    ids, real, logits, trace = recorded()
    short = trace.truncate(50)
    check(ids[:, :50], real[:, :50], logits[:, :50], short)
    cache = SparseBudgetCache(**SMALL, policy="keydiff", record=True)
    drive(small_llama(kv_heads=3), cache, ids[:, :50], real[:, :50], [40, *[1] * 10])
    for mine, theirs in zip(short.deaths, cache.trace().deaths, strict=True):
        assert torch.equal(mine, theirs)


def test_extended() -> None:
    trace = recorded()[3]
    longer = trace.extend(4)
    longer.validate()
    assert longer.tokens_seen == 64
    assert (longer.deaths[1][:, :, 60:] == NEVER).all()
    assert torch.equal(longer.truncate(60).deaths[1], trace.deaths[1])


@pytest.mark.parametrize("shift", [0, SHIFT])
def test_aligned_to_padding_on_the_right(shift: int) -> None:
    ids, real, logits, trace = recorded()
    counts = real.sum(-1)
    column = torch.arange(60 + SHIFT) - shift
    right = (column >= 0) & (column < counts[:, None])

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.new_zeros(3, 60 + SHIFT, *tensor.shape[2:])
        new[right] = tensor[real.bool()]
        return new

    aligned = trace.aligned_to(right)
    check(moved(ids), right.long(), moved(logits), aligned)
    assert torch.equal(aligned.real, right)
    back = aligned.aligned_to(real)
    for mine, theirs in zip(back.deaths, trace.deaths, strict=True):
        assert torch.equal(mine, theirs)


def test_aligned_to_one_token_more_or_fewer() -> None:
    _, real, _, trace = recorded()
    longer = trace.aligned_to(torch.cat([real, real.new_ones(3, 1)], dim=1))
    for mine, theirs in zip(longer.deaths, trace.extend(1).deaths, strict=True):
        assert torch.equal(mine, theirs)
    shorter = trace.aligned_to(real[:, :45])
    for mine, theirs in zip(shorter.deaths, trace.truncate(45).deaths, strict=True):
        assert torch.equal(mine, theirs)


def test_aligned_with_padding_in_the_middle() -> None:
    """Two turns of a batch, padded before each; the learner pads on the left only."""
    model = small_llama(kv_heads=3)
    ids, real = left_padded([30, 18])
    more, more_real = left_padded([14, 6], seed=1)
    ids, real = torch.cat([ids, more], 1), torch.cat([real, more_real], 1)
    cache = SparseBudgetCache(**SMALL, policy="rkv", record=True)
    logits = drive(model, cache, ids, real, [30, 14])
    target = torch.arange(44) >= 44 - real.sum(-1)[:, None]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        new = torch.zeros_like(tensor)
        new[target] = tensor[real.bool()]
        return new

    check(moved(ids), target.long(), moved(logits), cache.trace().aligned_to(target))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    left=st.integers(0, 9),
    right=st.integers(0, 9),
    rows=st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
def test_padding_and_rows_commute(left: int, right: int, rows: list[int]) -> None:
    trace = TRACE
    padded = trace.pad(left).pad(right, side="right")
    padded.validate()
    one = padded.select_rows(rows)
    other = trace.select_rows(rows).pad(right, side="right").pad(left, side="left")
    for mine, theirs in zip(one.deaths, other.deaths, strict=True):
        assert torch.equal(mine, theirs)
    back = one.aligned_to(trace.real[rows])
    for mine, theirs in zip(back.deaths, trace.deaths, strict=True):
        assert torch.equal(mine, theirs[rows])


TRACE = recorded()[3]


def test_beams_and_repeated_rows() -> None:
    model = small_llama(kv_heads=3)
    cache = SparseBudgetCache(**SMALL, policy="keydiff", record=True)
    drive(model, cache, tokens(2, 30))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
    ids = torch.cat([tokens(2, 30)[[1, 0, 0, 0]], tokens(4, 12, seed=1)], dim=1)
    logits = drive(model, cache, ids, chunks=[1] * 12, start=30)
    truth = dense_logits(model, ids, torch.ones_like(ids), cache.trace().deaths)[:, 30:]
    assert (truth - logits).abs().max() < 1e-3


def test_picture() -> None:
    figure = TRACE.plot(row=1)
    assert len(figure.axes) >= 3


def _changed(layer: int, place: tuple[int, int, int], value: int) -> EvictionTrace:
    deaths = [death.clone() for death in TRACE.deaths]
    deaths[layer][place] = value
    return EvictionTrace(deaths, TRACE.layer_indices, TRACE.tokens_seen)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (_changed(1, (0, 1, 10), 10), r"layer 1, row 0, head 1: the token in column 10 dies at 10"),
        (_changed(1, (0, 1, 10), 61), "dies at 61, which is neither between 11 and 60 nor"),
        (_changed(0, (2, 0, 50), -3), "dies at -3"),
        (_changed(1, (0, 2, 30), 0), "layer 1, row 0: column 30 is padding for head 2, but not"),
        (_changed(0, (2, 1, 0), NEVER), "column 0 holds a token for head 1.*hole"),
        (EvictionTrace([], [], 3), "deaths is empty"),
        (EvictionTrace(TRACE.deaths, [0], 60), "names 1 layers for 2"),
        (EvictionTrace(TRACE.deaths, [1, 0], 60), "must be ascending"),
        (EvictionTrace(TRACE.deaths, [0, 1], 61), r"must be \[3, heads, 61\]"),
    ],
)
def test_unsound(trace: EvictionTrace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace.validate()


def test_another_dtype() -> None:
    with pytest.raises(TypeError, match="deaths of layer 0 must be int32"):
        EvictionTrace([death.long() for death in TRACE.deaths], [0, 1], 60).validate()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TRACE.select_rows([3]), r"rows=\[3\] must lie between 0 and 2"),
        (lambda: TRACE.select_rows([]), "at least one row"),
        (lambda: TRACE.select_rows(torch.tensor([True, False])), "mask of shape"),
        (lambda: TRACE.pad(-1), "columns=-1 must not be negative"),
        (lambda: TRACE.pad(1, side="top"), "side='top' must be"),
        (lambda: TRACE.truncate(0), "columns=0 must lie between 1 and 60"),
        (lambda: TRACE.truncate(61), "columns=61 must lie"),
        (lambda: TRACE.extend(-2), "columns=-2"),
        (lambda: EvictionTrace.stack([]), "traces is empty"),
        (
            lambda: EvictionTrace.stack([TRACE, EvictionTrace(TRACE.deaths[:1], [0], 60)]),
            r"traces\[1\] has .* different models",
        ),
        (lambda: TRACE.aligned_to(torch.ones(2, 60)), r"must be \[3, T\]"),
        (lambda: TRACE.aligned_to(torch.ones(3, 0)), r"must be \[3, T\] for this trace, got"),
        (lambda: TRACE.aligned_to(torch.ones(3, 60)), "60 tokens in row 1, but the rollout read"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TRACE.select_rows([0.7, 1.2]), "rows must be whole numbers"),
        (lambda: TRACE.select_rows("ab"), "rows must be a list of row numbers, got 'ab'"),
        (lambda: TRACE.pad(1.5), r"columns must be an int, got 1\.5"),
        (lambda: TRACE.pad(True), "columns must be an int, got True"),
        (lambda: TRACE.truncate(30.0), r"columns must be an int, got 30\.0"),
        (lambda: TRACE.extend(1.0), r"columns must be an int, got 1\.0"),
        (lambda: EvictionTrace.stack(TRACE), "must be a list of traces, got EvictionTrace"),
        (lambda: EvictionTrace.stack([TRACE, 3]), r"traces\[1\] must be an EvictionTrace, got int"),
        (lambda: TRACE.aligned_to([[1] * 60] * 3), "attention_mask must be a tensor, got list"),
    ],
)
def test_other_types(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_stack_takes_any_iterable() -> None:
    assert EvictionTrace.stack(trace for trace in (TRACE, TRACE)).batch_size == 6


def test_traces_are_compared_as_objects() -> None:
    same = TRACE.select_rows([0, 1, 2])
    assert TRACE == TRACE and same != TRACE and len({TRACE, same}) == 2


def test_an_empty_trace_can_be_printed() -> None:
    assert "rows=0" in repr(EvictionTrace([], [], 0))


def test_a_model_without_budgets_has_no_trace() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    cache = SparseBudgetCache(**SMALL, record=True)
    with pytest.raises(ValueError, match="has seen no tokens"):
        cache.trace()
    MistralForCausalLM(config)(tokens(1, 9), past_key_values=cache)
    with pytest.raises(ValueError, match="no layer of this model has a budget"):
        cache.trace()


@torch.no_grad()
def test_the_trace_of_what_a_beam_search_returned() -> None:
    """As the docstring of `cache.trace` has it: fed again, token by token."""
    from sparse_cache.replay import rollout_logprobs

    model, ids = small_llama(), tokens(1, 40)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=SparseBudgetCache(**SMALL),
        max_new_tokens=30,
        num_beams=3,
        num_return_sequences=3,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    sampled = model.compute_transition_scores(
        output.sequences, output.logits, output.beam_indices, normalize_logits=True
    )
    cache = SparseBudgetCache(**SMALL, record=True)
    drive(model, cache, output.sequences[:, :-1], chunks=[40, *[1] * 29])
    found = rollout_logprobs(model, output.sequences, cache.trace(), start=40).logprobs
    assert (found - sampled).abs().max() < 1e-4
    assert "beam search" in str(SparseBudgetCache.trace.__doc__)

"""The instruments of the benchmarks, against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bootstrap import interval
from benchmarks.models import random_model, token_bytes
from benchmarks.pairing import PairedTimes, spread, time_in_turns
from benchmarks.quality import compare, segments_of
from benchmarks.soak import storage_bytes


class _Counting:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def step(self) -> None:
        self.log.append(self.name)

    def after(self) -> None:
        self.log.append(self.name.upper())


def test_turns_alternate_and_the_first_changes() -> None:
    log: list[str] = []
    times = time_in_turns(
        _Counting(log, "a"), _Counting(log, "b"), periods=2, steps=4, turn=2, rival_turn=1
    )
    pair = ["a", "A", "a", "A", "b", "B"]
    turned = ["b", "B", "a", "A", "a", "A"]
    assert log == (pair + turned) * 2
    assert [len(period) for period in times.subject] == [4, 4]
    assert [len(period) for period in times.rival] == [2, 2]


def test_steps_must_be_whole_turns() -> None:
    with pytest.raises(ValueError, match="steps=5 must be a multiple of turn=2"):
        time_in_turns(_Counting([], "a"), _Counting([], "b"), periods=1, steps=5, turn=2)


def test_ratio_of_a_period_is_that_of_its_means() -> None:
    times = PairedTimes(subject=[[1.0, 5.0], [2.0, 2.0]], rival=[[2.0], [4.0]])
    assert times.ratios() == [1.5, 0.5]


def test_spread() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "median": 3.0,
        "quartiles": [2.0, 4.0],
        "range": [1.0, 5.0],
        "count": 5,
    }
    assert spread([7.0])["quartiles"] == [7.0, 7.0]


def test_bootstrap_interval_of_a_known_spread() -> None:
    torch.manual_seed(0)
    # Independent segments: the standard error of the mean is 1 / sqrt(200 * 1) per segment mean.
    totals = torch.randn(200, 1) + 3
    low, high = interval(totals, torch.ones(200, 1))
    error = totals.std().item() / 200**0.5
    assert low == pytest.approx(totals.mean().item() - 1.96 * error, abs=0.25 * error)
    assert high == pytest.approx(totals.mean().item() + 1.96 * error, abs=0.25 * error)


def test_bootstrap_weighs_segments_by_their_tokens() -> None:
    totals, counts = torch.tensor([[6.0, 1.0]]), torch.tensor([[3.0, 1.0]])
    low, high = interval(totals, counts)
    assert (low, high) == (1.0, 2.0)


def test_segments_leave_out_tokens_without_a_figure() -> None:
    figures = torch.full((2, 200), torch.nan)
    figures[:, 100:] = 2.0
    totals, counts = segments_of(figures)
    assert counts.tolist() == [[64, 36]] * 2
    assert totals.tolist() == [[128, 72]] * 2


def test_storage_is_counted_once_and_in_full() -> None:
    class Layer:
        pass

    shared = torch.zeros(100)
    layer = Layer()
    layer.keys, layer.values = shared[:10], shared[50:60]
    Layer.__module__ = "sparse_cache.layer"
    layer.positions = torch.zeros(7, dtype=torch.int32)
    layer.again = shared[:1]
    cache = Layer()
    cache.layers = [layer]
    assert storage_bytes(cache) == (400, 28)


def test_bytes_of_a_token() -> None:
    # Keys and values, 2 layers, 2 KV heads of 64 / 4 numbers, 4 bytes each.
    assert token_bytes(random_model("tiny")) == 2 * 2 * 2 * 16 * 4


def test_quality_agrees_with_an_explicit_mask() -> None:
    """Streaming keeps known tokens, so its predictions follow from a mask alone."""
    model = random_model("tiny")
    torch.manual_seed(1)
    tokens = torch.randint(256, (2, 80))
    budget, interval_, window_sinks = 32, 16, 4
    from benchmarks.quality import dense_log_probabilities

    dense = dense_log_probabilities(model, tokens)
    measured = compare(
        model, tokens, dense, policy="streaming", budget=budget, interval=interval_, chunk=1
    )
    visible = torch.ones(80, 80, dtype=torch.bool).tril()
    for evicted_at in range(budget + interval_, 80, interval_):
        # Kept: the first `sinks` tokens and the most recent others.
        gone = torch.arange(window_sinks, evicted_at - (budget - window_sinks))
        visible[evicted_at:, gone] = False
    bias = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=bias.expand(2, 1, -1, -1)).logits
    sparse = logits.log_softmax(-1)
    expected = (dense.exp() * (dense - sparse)).sum(-1)[:, budget + interval_ :]
    found = measured.divergence[:, budget + interval_ :]
    assert measured.divergence[:, : budget + interval_].isnan().all()
    assert torch.allclose(found, expected, atol=1e-5)
    assert expected.mean() > 1e-3
    following = tokens[:, 1:, None]
    surprise = -sparse[:, :-1].gather(-1, following)[..., 0]
    assert torch.allclose(
        measured.surprise[:, budget + interval_ : -1], surprise[:, budget + interval_ :], atol=1e-4
    )
    assert measured.surprise[:, -1].isnan().all()

"""Each policy against a plain reading of its paper: loops over rows, heads and tokens, float64.

R-KV has a file of its own.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
import torch

from sparse_cache.policies import PolicyView, resolve_policy
from sparse_cache.policies.h2o import H2OPolicy
from sparse_cache.policies.lagkv import LagKVPolicy
from sparse_cache.policies.random_policy import RandomPolicy
from sparse_cache.policies.snapkv import SnapKVPolicy
from sparse_cache.policies.tova import TOVAPolicy

SHAPES = [
    {"rows": 1, "heads": 1, "group": 1, "stored": 5, "size": 3, "window": 4, "sinks": 1},
    {"rows": 2, "heads": 3, "group": 1, "stored": 23, "size": 7, "window": 2, "value_size": 5},
    {"rows": 2, "heads": 2, "group": 3, "stored": 40, "size": 16, "window": 8, "sinks": 4},
]
Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def length(a: Vector) -> float:
    return math.sqrt(dot(a, a))


def softmax(logits: Vector) -> Vector:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


def mean(numbers: Vector) -> float:
    return math.fsum(numbers) / len(numbers)


def assert_scores(actual: torch.Tensor, expected: list[list[Vector]], upto: int | None = None):
    assert actual.dtype == torch.float32
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual[..., :upto].double(), wanted, rtol=2e-5, atol=2e-6)


def per_head(view: PolicyView, score_head) -> list[list[Vector]]:
    """Call `score_head(row, head)` for every KV head of every row."""
    rows, heads = view.keys.shape[:2]
    return [[score_head(row, head) for head in range(heads)] for row in range(rows)]


def attention(view: PolicyView, row: int, query_head: int, back: int) -> Vector:
    """Attention over all stored keys of the query that lies `back` before the newest."""
    assert view.queries is not None
    group = view.queries.shape[1] // view.keys.shape[1]
    query = view.queries[row, query_head, -1 - back].double().tolist()
    keys = view.keys[row, query_head // group].double().tolist()
    visible = keys[: len(keys) - back]
    return softmax([dot(query, key) * view.scaling for key in visible]) + [0.0] * back


def pooled(scores: Vector, kernel: int, kind: str) -> Vector:
    half = kernel // 2
    result = []
    for j in range(len(scores)):
        near = [scores[i] for i in range(j - half, j + half + 1) if 0 <= i < len(scores)]
        result.append(max(near) if kind == "max" else math.fsum(near) / kernel)
    return result


@pytest.mark.parametrize("name", ["window", "streaming"])
def test_recency_orders_by_position_even_in_very_long_sequences(make_view, name):
    view = make_view(seen=60)
    expected = per_head(
        view, lambda b, h: [float(p - view.seen[b]) for p in view.positions[b, h].tolist()]
    )
    assert_scores(resolve_policy(name).score(view), expected)

    late = make_view(rows=1, seen=24, stored=24)
    late = dataclasses.replace(late, positions=late.positions + 2**40, seen=late.seen + 2**40)
    assert (resolve_policy(name).score(late).diff(dim=-1) == 1).all()


def test_window_gives_up_the_sinks_and_streaming_keeps_them():
    assert resolve_policy("window").keeps_sinks is False
    assert resolve_policy("streaming").keeps_sinks is True


@pytest.mark.parametrize("shape", SHAPES)
def test_knorm(make_view, shape):
    view = make_view(**shape)
    expected = per_head(view, lambda b, h: [-length(k) for k in view.keys[b, h].double().tolist()])
    scores = resolve_policy("knorm").score(view)
    # Rounded to 12 bits, see the policy.
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(scores.double(), wanted, rtol=2**-12, atol=0)


def test_knorm_ties_a_repeated_token_whatever_its_rotation(make_view):
    view = make_view(rows=1, heads=1, group=1, stored=9, size=16, window=2)
    angle = torch.rand(9, 8) * 6.28
    first, second = torch.randn(2, 8)
    turned = torch.cat(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1
    )
    scores = resolve_policy("knorm").score(dataclasses.replace(view, keys=turned[None, None]))
    assert scores.unique().numel() == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_keydiff(make_view, shape):
    view = make_view(**shape)

    def head_scores(row: int, head: int) -> Vector:
        keys = view.keys[row, head].double().tolist()
        units = [[x / length(key) for x in key] for key in keys]
        anchor = [mean(list(channel)) for channel in zip(*units, strict=True)]
        return [-dot(key, anchor) / length(key) / length(anchor) for key in keys]

    assert_scores(resolve_policy("keydiff").score(view), per_head(view, head_scores))


def lagkv_reading(view: PolicyView, lag: int, row: int, head: int, rank: bool) -> Vector:
    """Scores of the tokens that have a reference, from the first after the sinks."""

    def spread(states: list[Vector], start: int) -> Vector:
        reference = states[start + lag : start + 2 * lag]
        channels = list(zip(*reference, strict=True))
        low, high = [min(c) for c in channels], [max(c) for c in channels]
        return softmax(
            [
                statistics.stdev(
                    (x - a) / (b - a) for x, a, b in zip(token, low, high, strict=True)
                )
                for token in states[start : start + lag]
            ]
        )

    keys = view.keys[row, head].double().tolist()
    values = view.values[row, head].double().tolist()
    result: Vector = []
    for part in range((len(keys) - view.sinks) // lag - 1):
        start = view.sinks + part * lag
        both = zip(spread(keys, start), spread(values, start), strict=True)
        scores = [(k + v) / 2 for k, v in both]
        if rank:
            scores = [sum(other < score for other in scores) / lag for score in scores]
        result += scores
    return result


@pytest.mark.parametrize("rank", [True, False])
@pytest.mark.parametrize(("lag", "stored", "used"), [(5, 40, 5), (7, 31, 7), (128, 39, 9)])
def test_lagkv(make_view, rank, lag, stored, used):
    view = make_view(stored=stored, sinks=3, value_size=5)
    scores = LagKVPolicy(lag_size=lag, rank_in_partition=rank).score(view)
    expected = per_head(view, lambda b, h: lagkv_reading(view, used, b, h, rank))
    scored = ((stored - 3) // used - 1) * used
    assert len(expected[0][0]) == scored > 0
    assert_scores(scores[:, :, 3:], expected, scored)
    # What has no reference beats everything that has one, the newest most.
    assert (scores[:, :, 3 : 3 + scored] <= 1).all()
    assert (scores[:, :, 3 + scored :] > 1).all()
    assert (scores[:, :, 3 + scored :].diff(dim=-1) > 0).all()


@pytest.mark.parametrize("share_heads", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_tova(make_view, shape, share_heads):
    view = make_view(**shape, scaling=0.7)
    group, heads = shape["group"], shape["heads"]

    def head_scores(row: int, head: int) -> Vector:
        own = range(head * group, (head + 1) * group)
        asked = range(heads * group) if share_heads else own
        each = [attention(view, row, query_head, 0) for query_head in asked]
        return [mean(list(token)) for token in zip(*each, strict=True)]

    assert_scores(TOVAPolicy(share_heads=share_heads).score(view), per_head(view, head_scores))


@pytest.mark.parametrize(
    ("kernel", "pooling", "reduction"), [(1, "avg", "mean"), (5, "avg", "max"), (7, "max", "mean")]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_snapkv(make_view, shape, kernel, pooling, reduction):
    view = make_view(**shape, scaling=0.7)
    group, window = shape["group"], shape["window"]
    older = shape["stored"] - window

    def head_scores(row: int, head: int) -> Vector:
        votes = []
        for query_head in range(head * group, (head + 1) * group):
            each = [attention(view, row, query_head, back) for back in range(window)]
            votes.append([mean(list(token)) for token in zip(*each, strict=True)])
        reduce = max if reduction == "max" else mean
        together = [reduce(list(token)) for token in zip(*votes, strict=True)]
        return pooled(together[:older], kernel, pooling)

    policy = SnapKVPolicy(kernel_size=kernel, pooling=pooling, group_reduction=reduction)
    assert_scores(policy.score(view), per_head(view, head_scores), older)


@pytest.mark.parametrize("normalize", [True, False])
def test_h2o(make_view, normalize):
    view = make_view()

    def head_scores(row: int, head: int) -> Vector:
        scores = []
        for mass, position in zip(
            view.attention_mass[row, head].tolist(), view.positions[row, head].tolist(), strict=True
        ):
            queries_that_saw_it = len(range(position, int(view.seen[row])))
            scores.append(mass / queries_that_saw_it if normalize else mass)
        return scores

    assert_scores(H2OPolicy(normalize=normalize).score(view), per_head(view, head_scores))


def test_h2o_lets_a_new_token_beat_an_old_one(make_view):
    view = make_view(rows=1, heads=1)
    view.attention_mass.fill_(0.5)
    assert (H2OPolicy().score(view).diff(dim=-1) > 0).all()
    assert (H2OPolicy(normalize=False).score(view).diff(dim=-1) == 0).all()


def splitmix(number: int) -> int:
    """One SplitMix64 output, in Python's unbounded integers."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_random(make_view, seed):
    assert splitmix(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    view = make_view(layer_idx=11)

    def head_scores(row: int, head: int) -> Vector:
        scores = []
        for position in view.positions[row, head].tolist():
            lot = splitmix(seed)
            for part in (11, head, position):
                lot = splitmix(lot ^ part)
            scores.append((lot >> 40) / 2**24)
        return scores

    expected = torch.tensor(per_head(view, head_scores))
    assert torch.equal(RandomPolicy(seed=seed).score(view), expected)


def test_random_is_uniform_and_differs_between_layers_heads_and_seeds(make_view):
    view = make_view(rows=1, heads=4, stored=2000, seen=2000)
    other_layer = make_view(rows=1, heads=4, stored=2000, seen=2000, layer_idx=4)
    scores = RandomPolicy().score(view)
    shares = torch.histc(scores, bins=10, min=0, max=1) / scores.numel()
    assert (shares - 0.1).abs().max() < 0.02
    everything = torch.cat([scores, RandomPolicy().score(other_layer), RandomPolicy(1).score(view)])
    related = torch.corrcoef(everything.flatten(0, 1)) - torch.eye(12)
    assert related.abs().max() < 0.1

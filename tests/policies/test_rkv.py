"""R-KV: the published code to the bit, the intended method by a plain reading."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sparse_cache.policies import rkv
from sparse_cache.policies.rkv import RKVPolicy

SPARSE_RL = {"importance_weight": 0.1, "pooling": "avg", "group_reduction": "mean"}
FIRST_RELEASE = {"importance_weight": 0.07, "pooling": "max", "group_reduction": "max"}


def published(view, *, importance_weight, pooling, group_reduction) -> torch.Tensor:
    """The operations of the published code in their order and dtype.

    What decides is spelt out in loops. Products of matrices, means, softmaxes and pooling are
    left to torch, in the published shapes, since another shape may round the last bit otherwise.
    """
    rows, heads, stored, size = view.keys.shape
    older = stored - view.window
    keys = view.keys[0]  # row 0, whatever the batch
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    similarity = torch.matmul(unit, unit.transpose(1, 2))
    for head in range(heads):
        for i in range(stored):
            similarity[head, i, i] = 0
            last = 0  # and so key 0 is cleared where no key is similar
            for j, cosine in enumerate(similarity[head, i].tolist()):
                if cosine > 0.5:
                    last = j
            similarity[head, i, last] = 0
    redundancy = similarity.mean(dim=1).softmax(dim=-1)[:, :older]

    queries = view.queries.view(rows, heads, -1, view.window, size)
    logits = torch.matmul(queries, view.keys.transpose(2, 3).unsqueeze(2)) / math.sqrt(size)
    logits = logits.max(dim=2).values if group_reduction == "max" else logits.mean(dim=2)
    attention = logits[..., :older].softmax(dim=-1, dtype=torch.float32).mean(dim=-2)
    smooth = F.max_pool1d if pooling == "max" else F.avg_pool1d
    importance = smooth(attention.to(view.keys.dtype), 7, 1, 3)
    return (importance * importance_weight - redundancy * (1 - importance_weight)).float()


def intended(view, policy: RKVPolicy, row: int, head: int) -> list[float]:
    """The method as meant, in Python numbers."""
    heads, stored, window = view.keys.shape[1], view.keys.shape[2], view.window
    group, older = view.queries.shape[1] // heads, stored - window
    keys = view.keys[row, head].double().tolist()
    queries = view.queries[row].double().tolist()

    def dot(a: list[float], b: list[float]) -> float:
        return math.fsum(x * y for x, y in zip(a, b, strict=True))

    def softmax(logits: list[float]) -> list[float]:
        weights = [math.exp(x - max(logits)) for x in logits]
        return [w / math.fsum(weights) for w in weights]

    attention = [0.0] * older
    for w in range(window):
        logits = []
        for j in range(older):
            each = [dot(queries[head * group + g][w], keys[j]) * view.scaling for g in range(group)]
            logits.append(max(each) if policy.group_reduction == "max" else math.fsum(each) / group)
        attention = [a + p / window for a, p in zip(attention, softmax(logits), strict=True)]
    half = policy.kernel_size // 2
    importance = []
    for j in range(older):
        near = attention[max(0, j - half) : j + half + 1]
        importance.append(
            max(near) if policy.pooling == "max" else math.fsum(near) / policy.kernel_size
        )

    lengths = [math.sqrt(dot(key, key)) for key in keys]
    columns = [0.0] * stored
    for i in range(stored):
        line = [dot(keys[i], keys[j]) / (lengths[i] * lengths[j]) for j in range(stored)]
        line[i] = 0.0
        similar = [j for j in range(stored) if line[j] > policy.similarity_threshold]
        if similar:
            line[similar[-1]] = 0.0
        columns = [c + cosine / stored for c, cosine in zip(columns, line, strict=True)]
    redundancy = softmax(columns)
    weight = policy.importance_weight
    return [weight * importance[j] - (1 - weight) * redundancy[j] for j in range(older)]


SHAPES = [
    {"heads": 1, "group": 1, "stored": 9, "size": 3, "window": 8},
    {"heads": 3, "group": 1, "stored": 33, "size": 2, "window": 1},
    {"heads": 2, "group": 4, "stored": 70, "size": 5, "window": 8},
    {"heads": 2, "group": 3, "stored": 50, "size": 64, "window": 3},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [SPARSE_RL, FIRST_RELEASE], ids=["sparse-rl", "first"])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_the_published_code_to_the_bit(make_view, shape, form, dtype):
    for seed in range(3):
        view = make_view(rows=1, **shape, dtype=dtype, seed=seed)
        scores = RKVPolicy(**form, reference=True).score(view)
        assert torch.equal(scores[..., : -view.window], published(view, **form))


def test_reference_takes_redundancy_from_row_zero_and_the_default_does_not(make_view, one_row):
    view = make_view(rows=3, stored=30)
    scores = RKVPolicy(**SPARSE_RL, reference=True).score(view)
    torch.testing.assert_close(scores[..., :-4], published(view, **SPARSE_RL), rtol=0, atol=1e-6)

    alone = one_row(view, 2)
    assert (scores[2:] - RKVPolicy(**SPARSE_RL, reference=True).score(alone)).abs().max() > 1e-3
    torch.testing.assert_close(
        RKVPolicy().score(view)[2:], RKVPolicy().score(alone), rtol=0, atol=1e-6
    )


def test_only_the_reference_clears_key_zero_for_rows_without_a_similar_key(make_view):
    # Keys 0 to 2 lean on each other by 0.36, below the threshold; the window is orthogonal.
    view = make_view(rows=1, heads=1, group=1, stored=4, size=5, window=1, sinks=0)
    view.keys.zero_()
    view.keys[0, 0, :3, 0] = 0.6
    for i in range(3):
        view.keys[0, 0, i, 1 + i] = 0.8
    view.keys[0, 0, 3, 4] = 1
    only_redundancy = {"importance_weight": 0.0}
    default = -RKVPolicy(**only_redundancy).score(view)[0, 0, :3]
    reference = -RKVPolicy(**only_redundancy, reference=True).score(view)[0, 0, :3]
    each = torch.tensor([0.18, 0.18, 0.18, 0.0])
    cleared = torch.tensor([0.0, 0.18, 0.18, 0.0])
    torch.testing.assert_close(default, each.softmax(0)[:3])
    torch.testing.assert_close(reference, cleared.softmax(0)[:3])


def test_forgives_the_last_copy_of_a_repeated_key(make_view):
    # Keys 1, 2 and 4 are one key: rows 1 and 2 forgive key 4, row 4 forgives key 2.
    view = make_view(rows=1, heads=1, group=1, stored=6, size=6, window=1, sinks=0)
    view.keys.copy_(torch.eye(6)[[0, 1, 1, 2, 1, 3]])
    scores = -RKVPolicy(importance_weight=0.0).score(view)[0, 0, :5]
    columns = torch.tensor([0, 2, 1, 0, 0, 0]) / 6
    torch.testing.assert_close(scores, columns.softmax(0)[:5])


@pytest.mark.parametrize(
    "policy",
    [
        RKVPolicy(),
        RKVPolicy(importance_weight=0.07, pooling="max", group_reduction="max"),
        RKVPolicy(importance_weight=1.0, kernel_size=1),
        RKVPolicy(importance_weight=0.5, similarity_threshold=0.1, kernel_size=3),
        RKVPolicy(importance_weight=0.0, similarity_threshold=-1.0),
    ],
)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_default_is_the_intended_method_for_every_row_and_head(make_view, shape, policy):
    view = make_view(rows=2, **shape, scaling=0.4)
    scores = policy.score(view)[..., : -view.window]
    expected = [
        [intended(view, policy, row, head) for head in range(shape["heads"])] for row in range(2)
    ]
    torch.testing.assert_close(
        scores.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-5, atol=1e-6
    )


@pytest.mark.parametrize("numbers", [1, 4 * 37, 5 * 4 * 37, 36 * 4 * 37])
def test_blocks_of_rows_give_the_scores_of_the_whole_matrix(make_view, monkeypatch, numbers):
    view = make_view(rows=2, heads=2, stored=37, size=3)
    whole = RKVPolicy().score(view)
    monkeypatch.setattr(rkv, "_BLOCK_NUMBERS", numbers)
    torch.testing.assert_close(RKVPolicy().score(view), whole, rtol=0, atol=1e-7)

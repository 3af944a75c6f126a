"""Options out of range are refused in one sentence, and a missing observation too."""

from __future__ import annotations

import dataclasses

import pytest

from sparse_cache.policies.h2o import H2OPolicy
from sparse_cache.policies.lagkv import LagKVPolicy
from sparse_cache.policies.random_policy import RandomPolicy
from sparse_cache.policies.rkv import RKVPolicy
from sparse_cache.policies.snapkv import SnapKVPolicy
from sparse_cache.policies.tova import TOVAPolicy

NAN = float("nan")
REFUSED = [
    (RandomPolicy, "seed", [-1, 2**63, 1.0, True, "1", None]),
    (H2OPolicy, "normalize", [1, None, "yes"]),
    (TOVAPolicy, "share_heads", [0, None]),
    (LagKVPolicy, "lag_size", [1, 0, -4, 16.0, True, None]),
    (LagKVPolicy, "rank_in_partition", [1, None]),
    (SnapKVPolicy, "kernel_size", [0, -1, 4, 5.0, True, None]),
    (SnapKVPolicy, "pooling", ["mean", "", None]),
    (SnapKVPolicy, "group_reduction", ["avg", "sum", None]),
    (RKVPolicy, "importance_weight", [-0.1, 1.1, NAN, "0.1", True, None]),
    (RKVPolicy, "kernel_size", [0, 2, 7.0, True]),
    (RKVPolicy, "pooling", ["mean", None]),
    (RKVPolicy, "group_reduction", ["avg", None]),
    (RKVPolicy, "similarity_threshold", [-1.5, 2, NAN, None]),
    (RKVPolicy, "reference", [1, None]),
]
CASES = [(cls, option, value) for cls, option, values in REFUSED for value in values]


@pytest.mark.parametrize(("cls", "option", "value"), CASES)
def test_refused_with_the_option_and_its_value(cls, option, value):
    with pytest.raises(ValueError, match=f"^{option} must be ") as refusal:
        cls(**{option: value})
    assert str(value) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_option_is_covered_above():
    covered = {(cls, option) for cls, option, _ in REFUSED}
    for cls in {cls for cls, _ in covered}:
        assert {field.name for field in dataclasses.fields(cls)} == {
            option for other, option in covered if other is cls
        }


def test_bounds_are_allowed():
    assert RKVPolicy(importance_weight=0, similarity_threshold=-1).options() == {
        "importance_weight": 0,
        "kernel_size": 7,
        "pooling": "avg",
        "group_reduction": "mean",
        "similarity_threshold": -1,
        "reference": False,
    }
    assert RandomPolicy(seed=2**63 - 1).seed == 2**63 - 1
    assert LagKVPolicy(lag_size=2).lag_size == 2


def test_options_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RKVPolicy().importance_weight = 0.5


@pytest.mark.parametrize("policy", [TOVAPolicy(), SnapKVPolicy(), RKVPolicy()])
def test_missing_queries_are_refused(make_view, policy):
    view = make_view()
    for queries in (None, view.queries[:, :, :0]):
        with pytest.raises(ValueError, match=f"policy '{policy.name}' scores with the last queri"):
            policy.score(dataclasses.replace(view, queries=queries))


def test_missing_attention_mass_is_refused(make_view):
    with pytest.raises(ValueError, match=r"policy 'h2o' needs view\.attention_mass"):
        H2OPolicy().score(dataclasses.replace(make_view(), attention_mass=None))

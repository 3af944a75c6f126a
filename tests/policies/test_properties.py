"""What holds for every policy, whatever the shape, dtype and content of the cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache.policies import EvictionPolicy, policy_names, resolve_policy
from sparse_cache.policies.h2o import H2OPolicy
from sparse_cache.policies.lagkv import LagKVPolicy
from sparse_cache.policies.rkv import RKVPolicy
from sparse_cache.policies.snapkv import SnapKVPolicy
from sparse_cache.policies.tova import TOVAPolicy

TEN = ["h2o", "keydiff", "knorm", "lagkv", "random", "rkv", "snapkv", "streaming", "tova", "window"]
POLICIES: dict[str, EvictionPolicy] = {
    **{name: resolve_policy(name) for name in TEN},
    "h2o-sum": H2OPolicy(normalize=False),
    "lagkv-scores": LagKVPolicy(lag_size=3, rank_in_partition=False),
    "rkv-max": RKVPolicy(pooling="max", group_reduction="max", importance_weight=0.5),
    "snapkv-max": SnapKVPolicy(kernel_size=31, pooling="max", group_reduction="max"),
    "tova-heads": TOVAPolicy(share_heads=False),
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@st.composite
def layers(draw: st.DrawFn) -> dict[str, object]:
    window = draw(st.integers(1, 8))
    return {
        "rows": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "stored": window + draw(st.integers(1, 40)),
        "size": draw(st.integers(1, 17)),
        "value_size": draw(st.integers(1, 9)),
        "window": window,
        "sinks": draw(st.integers(0, 5)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        "scale": draw(st.sampled_from([1e-3, 1.0, 30.0])),
        "seed": draw(st.integers(0, 2**32)),
    }


def same_settings(test):
    return settings(max_examples=50, deadline=None, derandomize=True)(test)


def test_the_ten_policies_are_there():
    assert set(TEN) <= set(policy_names())


@each_policy
@same_settings
@given(layer=layers())
def test_float32_finite_deterministic_and_rows_alone_equal_rows_together(
    make_view, one_row, policy, layer
):
    view = make_view(**layer)
    before = [t.clone() for t in vars(view).values() if isinstance(t, torch.Tensor)]
    scores = policy.score(view)
    assert scores.dtype == torch.float32
    assert scores.shape == view.keys.shape[:3]
    assert torch.isfinite(scores).all()
    assert torch.equal(scores, policy.score(view))
    after = [t for t in vars(view).values() if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for row in range(layer["rows"]):
        alone = policy.score(one_row(view, row))
        torch.testing.assert_close(scores[row : row + 1], alone, rtol=1e-5, atol=1e-5)


@each_policy
def test_low_precision_storage_is_scored_in_float32(make_view, policy):
    stored = make_view(dtype=torch.bfloat16, stored=40)
    exact = {
        name: value.float()
        for name, value in vars(stored).items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    }
    assert torch.equal(policy.score(stored), policy.score(dataclasses.replace(stored, **exact)))


@each_policy
def test_a_row_of_nan_does_not_touch_its_neighbour(make_view, one_row, policy):
    view = make_view(rows=2, stored=40)
    for tensor in (view.keys, view.values, view.queries, view.attention_mass):
        tensor[0] = torch.nan
    scores = policy.score(view)
    torch.testing.assert_close(scores[1:], policy.score(one_row(view, 1)), rtol=1e-5, atol=1e-5)


@each_policy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_empty_and_equal_keys_score_finite(make_view, policy, dtype):
    view = make_view(dtype=dtype)
    view.keys[0] = 0
    view.values[0] = 0
    view.keys[1] = view.keys[1, :, :1].clone()
    view.values[1] = view.values[1, :, :1].clone()
    assert torch.isfinite(policy.score(view)).all()


@each_policy
def test_storage_need_not_be_contiguous(make_view, policy):
    view = make_view(stored=30)
    wide = {
        name: torch.cat([getattr(view, name)] * 2, dim=2)[:, :, : getattr(view, name).shape[2]]
        for name in ("keys", "values", "positions", "queries", "attention_mass")
    }
    torch.testing.assert_close(
        policy.score(dataclasses.replace(view, **wide)), policy.score(view), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", ["random", "knorm", "streaming", "window", "h2o"])
def test_a_token_keeps_its_score_when_others_are_evicted(make_view, name):
    view = make_view(stored=30)
    kept = torch.arange(0, 30, 2)
    fewer = {
        field: getattr(view, field)[:, :, kept]
        for field in ("keys", "values", "positions", "attention_mass")
    }
    policy = resolve_policy(name)
    assert torch.equal(
        policy.score(dataclasses.replace(view, **fewer)), policy.score(view)[..., kept]
    )

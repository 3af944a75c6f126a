"""The registry: a user's policy in ten lines, and names that are taken, missing or malformed."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sparse_cache.policies import (
    EvictionPolicy,
    policy_class,
    policy_names,
    register_policy,
    resolve_policy,
)
from sparse_cache.policies import base as registry
from sparse_cache.policies._catalogue import catalogue

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry._REGISTRY, "classes", dict(registry._REGISTRY.classes))


def test_a_user_policy_takes_ten_lines(make_view):
    @register_policy("even")
    @dataclass(frozen=True)
    class EvenPolicy(EvictionPolicy):
        """Keep tokens at even positions."""

        bonus: float = 1.0

        def score(self, view):
            return (view.positions % 2 == 0).float() * self.bonus

    view = make_view()
    assert "even" in policy_names()
    assert resolve_policy("even") == EvenPolicy()
    assert resolve_policy(EvenPolicy(bonus=2.0)).options() == {"bonus": 2.0}
    assert EvenPolicy.name == "even"
    scores = resolve_policy("even").score(view)
    assert torch.equal(scores == 1, view.positions % 2 == 0)
    assert "| `even` | tokens at even positions | - | `bonus=1.0` | none |" in catalogue()


def test_a_taken_name_is_refused_and_the_first_owner_stays():
    first = policy_class("rkv")
    with pytest.raises(ValueError, match=r"'rkv' is taken by sparse_cache\.policies\.rkv\."):

        @register_policy("rkv")
        class Mine(EvictionPolicy):
            def score(self, view):
                return view.positions.float()

    assert policy_class("rkv") is first


def test_registering_the_same_class_again_is_allowed():
    cls = policy_class("knorm")
    assert register_policy("knorm")(cls) is cls


def test_unknown_names_list_the_known_ones():
    known = ", ".join(policy_names())
    for look_up in (resolve_policy, policy_class):
        with pytest.raises(ValueError, match="policy='r-kv' is unknown") as refusal:
            look_up("r-kv")
        assert known in str(refusal.value)


@pytest.mark.parametrize("wrong", [None, 3, EvictionPolicy, object()])
def test_what_is_neither_name_nor_policy_is_refused(wrong):
    with pytest.raises(TypeError, match="policy must be a name or an EvictionPolicy") as refusal:
        resolve_policy(wrong)
    assert "snapkv" in str(refusal.value)


def test_only_policies_can_be_registered_and_only_under_a_name():
    with pytest.raises(TypeError, match="expects a subclass of EvictionPolicy"):
        register_policy("thing")(dict)
    assert "thing" not in policy_names()
    for wrong in ("", None, dict):
        with pytest.raises(TypeError, match="expects a name"):
            register_policy(wrong)


def test_names_resolve_to_the_policy_of_that_name():
    for name in policy_names():
        policy = resolve_policy(name)
        assert policy.name == name
        assert policy == policy_class(name)(**policy.options())


def test_the_documented_table_is_the_generated_one(capsys):
    runpy.run_module("sparse_cache.policies", run_name="__main__")
    assert capsys.readouterr().out == catalogue() == DOCS.read_text(encoding="utf-8")

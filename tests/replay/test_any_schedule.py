"""Replay equals the incremental run, and a forward written out, whatever was evicted when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache import NEVER, EvictionTrace
from sparse_cache.replay import replay
from tests.cache.cases import Case, cases
from tests.cache.driving import drive, small_llama, tokens
from tests.cache.oracle import dense_logits

WAYS = ("dense", "flex", "gather")


@settings(derandomize=True, deadline=None, max_examples=40)
@given(case=cases(), way=st.sampled_from(WAYS))
@torch.no_grad()
def test_replay_is_the_incremental_run(case: Case, way: str) -> None:
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
    logits = drive(model, cache, ids, real, case.chunks)
    with replay(model, cache.trace(), way=way):
        whole = model(ids, attention_mask=real).logits
    columns = real.bool()
    scale = max(1.0, float(logits[columns].abs().max()))
    assert float((whole - logits)[columns].abs().max()) < 1e-4 * scale
    assert torch.isfinite(whole).all()


@st.composite
def traces(draw: st.DrawFn) -> dict[str, Any]:
    """Deaths as no policy would choose them, each head and row on its own."""
    seed, length = draw(st.integers(0, 2**16)), draw(st.integers(2, 300))
    return {
        "seed": seed,
        "length": length,
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "layers": draw(st.integers(1, 2)),
        "rows": draw(st.integers(1, 3)),
        "lifetime": draw(st.sampled_from([1, 3, 20, 150])),
        "period": draw(st.sampled_from([1, 7, 64])),
        "way": draw(st.sampled_from(WAYS)),
    }


@settings(derandomize=True, deadline=None, max_examples=25)
@given(drawn=traces())
@torch.no_grad()
def test_random_deaths(drawn: dict[str, Any]) -> None:
    model = small_llama(layers=drawn["layers"], kv_heads=drawn["kv_heads"], group=drawn["group"])
    generator = torch.Generator().manual_seed(drawn["seed"])
    rows, length = drawn["rows"], drawn["length"]
    padding = torch.randint(0, max(length // 2, 1), (rows, 1), generator=generator)
    real = torch.arange(length) >= padding
    column = torch.arange(length)
    deaths = []
    for _ in range(drawn["layers"]):
        lives = torch.rand(rows, drawn["kv_heads"], length, generator=generator).log()
        death = column + 1 - (lives * drawn["lifetime"]).long()
        # Evictions come in periods, at times of the row's own.
        death = death + (-(death - padding[:, :, None])).remainder(drawn["period"])
        death = torch.where(death <= length, death, NEVER).int()
        deaths.append(death.masked_fill(~real[:, None], 0))
    trace = EvictionTrace(deaths, list(range(drawn["layers"])), length)
    ids = tokens(rows, length, seed=drawn["seed"])
    with replay(model, trace, way=drawn["way"]):
        logits = model(ids, attention_mask=real.long()).logits
    truth = dense_logits(model, ids, real.long(), deaths)
    scale = max(1.0, float(truth[real].abs().max()))
    assert float((logits.double() - truth)[real].abs().max()) < 1e-4 * scale


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    model_type=st.sampled_from(["gpt_oss", "gemma2", "deepseek_v3", "jamba", "opt", "qwen3_moe"]),
    policy=st.sampled_from(["random", "keydiff", "streaming", "knorm"]),
    chunks=st.lists(st.one_of(st.just(1), st.integers(2, 20)), min_size=4, max_size=14),
    interval=st.integers(1, 9),
    way=st.sampled_from(["dense", "gather"]),
)
@torch.no_grad()
def test_random_architectures(
    model_type: str, policy: str, chunks: list[int], interval: int, way: str
) -> None:
    from sparse_cache import SparseBudgetCache
    from tests.architectures.build import build_tiny

    model, vocabulary, _ = build_tiny(model_type)
    cache = SparseBudgetCache(
        10,
        policy=policy,
        interval=interval,
        window=2,
        sinks=1,
        config=model.config,
        record=True,
    )
    if model_type == "jamba":
        # Its linear layers take a state along for single tokens only.
        chunks = [chunks[0], *[1] * sum(chunks[1:])]
    ids = tokens(2, sum(chunks)) % (vocabulary - 3) + 3
    real = torch.ones_like(ids)
    real[1, : chunks[0] // 2] = 0
    logits = drive(model, cache, ids, real, chunks)
    with replay(model, cache.trace(), way=way):
        whole = model(input_ids=ids, attention_mask=real).logits
    columns = real.bool()
    scale = max(1.0, float(logits[columns].abs().max()))
    assert float((whole - logits)[columns].abs().max()) < 1e-4 * scale

"""Bad input gets one clear sentence: the argument, the value, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, JambaConfig, MistralConfig

from sparse_cache import SparseBudgetCache, UnsupportedModelError
from sparse_cache.compatibility import check_transformers
from sparse_cache.errors import warn_once

from .driving import POLICIES, SMALL, VOCABULARY, decode, drive, small_llama, tokens


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": 0}, ValueError, ["budget=0", "at least 1"]),
        ({"budget": -5}, ValueError, ["budget=-5", "at least 1"]),
        ({"budget": 1.5}, ValueError, ["budget=1.5", "between 0 and 1"]),
        ({"budget": 0.0}, ValueError, ["budget=0.0", "between 0 and 1"]),
        ({"budget": 1.0}, ValueError, ["budget=1.0", "between 0 and 1"]),
        ({"budget": -0.5}, ValueError, ["budget=-0.5", "between 0 and 1"]),
        ({"budget": float("nan")}, ValueError, ["budget=nan", "between 0 and 1"]),
        ({"budget": float("inf")}, ValueError, ["budget=inf", "between 0 and 1"]),
        ({"budget": 11}, ValueError, ["budget=11", "8 + 4", "at least 12"]),
        ({"budget": "512"}, TypeError, ["budget", "'512'"]),
        ({"budget": True}, TypeError, ["budget", "True"]),
        ({"budget": None}, TypeError, ["budget", "None"]),
        ({"policy": "rvk"}, ValueError, ["policy='rvk'", *POLICIES]),
        ({"policy": 3}, TypeError, ["policy", "int", *POLICIES]),
        ({"policy": None}, TypeError, ["policy", "NoneType", *POLICIES]),
        ({"interval": 0}, ValueError, ["interval=0", "at least 1"]),
        ({"interval": -1}, ValueError, ["interval=-1", "at least 1"]),
        ({"interval": 2.5}, TypeError, ["interval", "2.5", "whole number"]),
        ({"interval": True}, TypeError, ["interval", "True"]),
        ({"window": 0}, ValueError, ["window=0", "at least 1"]),
        ({"window": "8"}, TypeError, ["window", "'8'"]),
        ({"sinks": -1}, ValueError, ["sinks=-1", "at least 0"]),
        ({"backend": "cuda"}, ValueError, ["backend='cuda'", "auto", "torch", "triton"]),
        ({"record": 1}, TypeError, ["record", "True or False", "1"]),
        ({"config": {"layers": 2}}, TypeError, ["config", "model.config", "dict"]),
    ],
)
def test_at_construction(
    arguments: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        SparseBudgetCache(**arguments)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="bugdet"):
        SparseBudgetCache(bugdet=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SparseBudgetCache(512, "rkv")  # type: ignore[misc]


def test_the_smallest_budget_works() -> None:
    cache = SparseBudgetCache(budget=1, window=1, sinks=0, interval=1)
    decode(small_llama(), cache, tokens(1, 30))
    assert cache.stats().tokens_kept == 1


@pytest.mark.parametrize("rows", [[[1] * 40, [1] * 30 + [0] * 10]])
def test_right_padding(rows: list[list[int]]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"attention_mask .*padding_side = 'left'"):
        decode(
            small_llama(),
            SparseBudgetCache(**SMALL),
            tokens(2, 40),
            attention_mask=torch.tensor(rows),
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_with_nan(policy: str) -> None:
    model = small_llama(dtype=torch.float16, seed=5)
    weight = model.model.layers[1].self_attn.k_proj.weight
    saved = weight.detach().clone()
    try:
        weight.data.fill_(float("nan"))
        with pytest.raises(ValueError, match=r"keys of layer 1 hold NaN.*float16.*bfloat16"):
            drive(model, SparseBudgetCache(**SMALL, policy=policy), tokens(1, 40))
    finally:
        weight.data.copy_(saved)


def test_train_mode_with_gradient_checkpointing() -> None:
    """Some releases drop the cache then: the answer is that of eval mode, or a sentence of ours."""
    model = small_llama(seed=6)
    expected = decode(model, SparseBudgetCache(**SMALL), tokens(1, 40))
    model.train()
    model.gradient_checkpointing_enable()
    cache = SparseBudgetCache(**SMALL)
    try:
        output = decode(model, cache, tokens(1, 40))
    except UnsupportedModelError as error:
        assert "gradient checkpointing" in str(error)
        assert "model.eval()" in str(error)
    else:
        assert torch.equal(output.sequences, expected.sequences)
        assert cache.stats().evictions == 2 * 6
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


def test_cache_implementation_at_the_same_time() -> None:
    with pytest.raises(ValueError, match="cache_implementation"):
        decode(
            small_llama(), SparseBudgetCache(**SMALL), tokens(1, 40), cache_implementation="static"
        )


def test_a_config_of_another_model() -> None:
    three, two = small_llama(layers=3), small_llama()
    for config, model in ((two.config, three), (three.config, two)):
        with pytest.raises(ValueError, match=r"config is of another model.*config=model\.config"):
            decode(model, SparseBudgetCache(**SMALL, config=config), tokens(1, 40))


def test_the_right_config_changes_nothing() -> None:
    model = small_llama()
    a = decode(model, SparseBudgetCache(**SMALL, config=model.config), tokens(1, 40))
    b = decode(model, SparseBudgetCache(**SMALL), tokens(1, 40))
    assert torch.equal(a.sequences, b.sequences)


def small_bloom() -> BloomForCausalLM:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    return BloomForCausalLM(config).eval()


def test_a_query_policy_where_queries_cannot_be_seen() -> None:
    """Bloom has attention code of its own and biases by slot: refused one way or the other."""
    with pytest.raises(UnsupportedModelError):
        decode(small_bloom(), SparseBudgetCache(**SMALL), tokens(1, 40))


def test_a_linear_hybrid_without_config() -> None:
    from transformers import JambaForCausalLM

    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    model = JambaForCausalLM(config).eval()
    cache = SparseBudgetCache(**SMALL, config=config)
    expected = decode(model, cache, tokens(1, 40))
    assert cache.stats().budgeted_layers == 2
    assert cache.stats().tokens_kept < 25
    # Without the config: the same, or a sentence that says to pass it.
    try:
        output = decode(model, SparseBudgetCache(**SMALL), tokens(1, 40))
    except UnsupportedModelError as error:
        assert "config=model.config" in str(error)
    else:
        assert torch.equal(output.sequences, expected.sequences)


def test_only_sliding_layers_are_warned_about() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY, num_hidden_layers=2, sliding_window=16, num_key_value_heads=2
    )
    warn_once.cache_clear()  # another test may have had this warning
    with pytest.warns(UserWarning, match="nothing to evict"):
        SparseBudgetCache(**SMALL, config=config)


@pytest.mark.parametrize("version", ["5.16.9", "4.57.0", "5.25.0", "6.0.0"])
def test_transformers_outside_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=rf"5\.17.*found {version}; install"):
        check_transformers()


def test_a_trace_that_was_not_recorded() -> None:
    cache = SparseBudgetCache(**SMALL)
    decode(small_llama(), cache, tokens(1, 40))
    with pytest.raises(ValueError, match="record=True"):
        cache.trace()

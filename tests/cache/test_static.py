"""`static=True`: the same tokens from decoding steps that compile into one graph."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, Gemma3TextConfig
from transformers import Gemma3ForCausalLM as Gemma

from sparse_cache import SparseBudgetCache
from sparse_cache.errors import UnsupportedModelError
from tests.architectures.build import build_tiny

from .driving import (
    LARGE,
    POLICIES,
    SMALL,
    VOCABULARY,
    decode,
    drive,
    largest_difference,
    left_padded,
    small_llama,
    tokens,
)


def compiled(backend: str = "eager") -> CompileConfig:
    """Compile `generate`'s decoding steps into one graph, also on the CPU."""
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def same(first: SparseBudgetCache, second: SparseBudgetCache) -> bool:
    """Whether both evicted the same tokens at the same time."""
    pairs = zip(first.trace().deaths, second.trace().deaths, strict=True)
    return first.stats().evictions == second.stats().evictions and all(
        torch.equal(a, b) for a, b in pairs
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_eager_steps_give_what_a_growing_cache_gives(policy: str, attention: str) -> None:
    model = small_llama(attention=attention)
    ids, real = left_padded([30, 7, 19])
    settings: dict[str, Any] = {**SMALL, "policy": policy, "record": True}
    caches = [SparseBudgetCache(**settings), SparseBudgetCache(**settings, static=True)]
    first, second = (decode(model, cache, ids, 40, attention_mask=real) for cache in caches)
    assert torch.equal(first.sequences, second.sequences)
    assert largest_difference(first, second) < 1e-4
    assert caches[0].stats().evictions > 10
    assert same(*caches)


@pytest.mark.parametrize("policy", ["rkv", "h2o", "streaming", "keydiff"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_graph_for_all_prompts(policy: str, attention: str) -> None:
    torch.compiler.reset()
    counters.clear()
    model = small_llama(attention=attention)
    settings: dict[str, Any] = {**SMALL, "policy": policy, "record": True}
    static = SparseBudgetCache(**settings, static=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(([30, 11], [7, 40], [25, 25])):
            ids, real = left_padded(lengths, seed)
            usual = SparseBudgetCache(**settings)
            expected = decode(model, usual, ids, 40, attention_mask=real)
            static.reset()
            answer = decode(model, static, ids, 40, attention_mask=real, compile_config=compiled())
            assert torch.equal(expected.sequences, answer.sequences)
            assert largest_difference(expected, answer) < 1e-4
            assert usual.stats().evictions > 10
            assert same(usual, static)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductor() -> None:
    torch.compiler.reset()
    model = small_llama()
    ids, real = left_padded([30, 11])
    usual = SparseBudgetCache(**SMALL, record=True)
    expected = decode(model, usual, ids, 30, attention_mask=real)
    static = SparseBudgetCache(**SMALL, record=True, static=True)
    config = compiled("inductor")
    answer = decode(model, static, ids, 30, attention_mask=real, compile_config=config)
    assert torch.equal(expected.sequences, answer.sequences)
    assert largest_difference(expected, answer) < 1e-3
    assert same(usual, static)


def test_a_loop_of_ones_own() -> None:
    torch.compiler.reset()
    counters.clear()
    model = small_llama()
    ids = torch.cat([tokens(2, 30), tokens(2, 40, seed=1)], dim=1)
    usual = SparseBudgetCache(**SMALL, record=True)
    expected = drive(model, usual, ids, None, [30, *[1] * 40])
    step = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    static = SparseBudgetCache(**SMALL, record=True, static=True)
    logits = [drive(model, static, ids[:, :30])]
    with torch.no_grad():
        for column in range(30, 70):
            static.evict()
            output = step(ids[:, column : column + 1], past_key_values=static, use_cache=True)
            logits.append(output.logits)
    assert (expected - torch.cat(logits, dim=1)).abs().max().item() < 1e-4
    assert same(usual, static)
    assert counters["stats"]["unique_graphs"] == 1


def test_forgetting_to_evict_is_an_error() -> None:
    torch.compiler.reset()
    model = small_llama()
    step = torch.compile(copy.deepcopy(model), fullgraph=True, backend="eager")
    static = SparseBudgetCache(**SMALL, static=True)
    drive(model, static, tokens(1, 30))
    with torch.no_grad(), pytest.raises(IndexError):
        for _ in range(6):
            step(tokens(1, 1), past_key_values=static, use_cache=True)


def test_a_compiled_prompt_is_refused() -> None:
    torch.compiler.reset()
    step = torch.compile(copy.deepcopy(small_llama()), fullgraph=True, backend="eager")
    static = SparseBudgetCache(**SMALL, static=True)
    with torch.no_grad(), pytest.raises(Exception, match="compiles decoding steps only"):
        step(tokens(1, 30), past_key_values=static, use_cache=True)


def test_memory_stays_where_it_is() -> None:
    model = small_llama()
    static = SparseBudgetCache(**SMALL, policy="h2o", static=True)
    where = set()
    for seed in range(3):
        static.reset()
        ids, real = left_padded([30, 6], seed)
        decode(model, static, ids, 30, attention_mask=real)
        layers = [layer.held for layer in static.layers]
        tensors = [tensor for held in layers for tensor in held.storage.tensors()]
        where.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert all(tensor.shape[2] == 25 for tensor in tensors)
        assert static.stats().tokens_kept <= 25
    assert len(where) == 1


def test_another_batch_size_after_reset() -> None:
    model = small_llama()
    static = SparseBudgetCache(**SMALL, static=True)
    for batch in (1, 3, 2):
        static.reset()
        expected = decode(model, SparseBudgetCache(**SMALL), tokens(batch, 22))
        answer = decode(model, static, tokens(batch, 22))
        assert torch.equal(expected.sequences, answer.sequences)


def test_lossless_below_the_budget() -> None:
    from transformers import DynamicCache

    model = small_llama()
    ids, real = left_padded([12, 5])
    static = SparseBudgetCache(**LARGE, static=True)
    answer = decode(model, static, ids, attention_mask=real)
    dense = decode(model, DynamicCache(), ids, attention_mask=real)
    assert torch.equal(answer.sequences, dense.sequences)
    assert largest_difference(answer, dense) < 1e-5


def test_conversation_and_copies() -> None:
    model = small_llama()
    usual, static = SparseBudgetCache(**SMALL), SparseBudgetCache(**SMALL, static=True)
    answers = []
    for cache in (usual, static):
        first = decode(model, cache, tokens(2, 22), 15).sequences
        branch = copy.deepcopy(cache)
        more = torch.cat([first, tokens(2, 6, seed=4)], dim=1)
        other = torch.cat([first, tokens(2, 9, seed=5)], dim=1)
        answers.append(
            [decode(model, cache, more, 15).sequences, decode(model, branch, other, 15).sequences]
        )
    for expected, answer in zip(*answers, strict=True):
        assert torch.equal(expected, answer)


def test_beams() -> None:
    model = small_llama()
    answers = [
        model.generate(
            tokens(2, 22),
            past_key_values=SparseBudgetCache(**SMALL, static=static),
            attention_mask=torch.ones(2, 22, dtype=torch.long),
            num_beams=3,
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )
        for static in (False, True)
    ]
    assert torch.equal(*answers)


@pytest.mark.slow
def test_sliding_layers_are_static_too() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Gemma(config).eval()
    ids, real = left_padded([30, 11])
    usual = SparseBudgetCache(**SMALL)
    expected = decode(model, usual, ids, attention_mask=real)
    static = SparseBudgetCache(**SMALL, static=True)
    answer = decode(model, static, ids, attention_mask=real, compile_config=compiled())
    assert torch.equal(expected.sequences, answer.sequences)
    assert largest_difference(expected, answer) < 1e-3
    assert static.stats().evictions == usual.stats().evictions > 0
    assert static.stats().other_layers == 2


def test_models_that_rearrange_keys_are_refused_with_the_prompt() -> None:
    model = build_tiny("deepseek_v3")[0]
    for cache in (SparseBudgetCache(**SMALL, static=True),) * 2:
        with pytest.raises(UnsupportedModelError, match="static=False"):
            decode(model, cache, tokens(1, 22), 4, compile_config=compiled())
        cache.reset()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"static=True needs .* budget=0.5"):
        SparseBudgetCache(0.5, static=True)
    with pytest.raises(TypeError, match="static must be True or False, got 1"):
        SparseBudgetCache(static=1)  # type: ignore[arg-type]
    static = SparseBudgetCache(**SMALL, static=True)
    drive(small_llama(), static, tokens(1, 30))
    with pytest.raises(UnsupportedModelError, match="static=False"):
        static.activate_past_recording()


def test_a_step_that_was_broken_off_is_noticed() -> None:
    model = copy.deepcopy(small_llama())
    static = SparseBudgetCache(**SMALL, static=True)
    ids = tokens(1, 40)
    drive(model, static, ids, None, [30, 1])

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[0].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        drive(model, static, ids, None, [1], start=31)
    hook.remove()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="did not finish"):
            drive(model, static, ids, None, [1], start=31)
    static.reset()
    expected = drive(model, SparseBudgetCache(**SMALL), ids, None, [30, 1, 1])
    again = drive(model, static, ids, None, [30, 1, 1])
    assert (again - expected).abs().max().item() < 1e-4


def test_other_models_after_reset() -> None:
    static = SparseBudgetCache(**SMALL, static=True)
    for layers, kv_heads in ((3, 2), (1, 2), (2, 1), (3, 2)):
        model = small_llama(layers=layers, kv_heads=kv_heads)
        static.reset()
        expected = decode(model, SparseBudgetCache(**SMALL), tokens(2, 22))
        answer = decode(model, static, tokens(2, 22))
        assert torch.equal(expected.sequences, answer.sequences)
        assert static.stats().budgeted_layers == layers
        assert static.get_seq_length() == answer.sequences.shape[1] - 1


@pytest.mark.slow
def test_two_threads_compile_at_once() -> None:
    torch.compiler.reset()
    model = small_llama()
    prompts = [tokens(2, 22, seed=seed) for seed in range(2)]
    expected = [decode(model, SparseBudgetCache(**SMALL), prompt).sequences for prompt in prompts]

    def answer(prompt: torch.Tensor) -> torch.Tensor:
        cache = SparseBudgetCache(**SMALL, static=True)
        return decode(model, cache, prompt, compile_config=compiled()).sequences

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(answer, prompts))
    assert all(torch.equal(a, b) for a, b in zip(expected, answers, strict=True))


def test_inference_mode_and_back() -> None:
    model = small_llama()
    ids = tokens(1, 60)
    usual, static = (SparseBudgetCache(**SMALL, static=static) for static in (False, True))
    expected = drive(model, usual, ids, None, [30, *[1] * 30])
    with torch.inference_mode():
        first = drive(model, static, ids, None, [30, *[1] * 15])
    second = drive(model, static, ids, None, [1] * 15, start=45)
    assert (torch.cat([first, second], dim=1) - expected).abs().max().item() < 1e-4


def test_gradients_are_refused() -> None:
    model = copy.deepcopy(small_llama())
    static = SparseBudgetCache(**SMALL, static=True)
    drive(model, static, tokens(1, 30))
    with torch.enable_grad(), pytest.raises(UnsupportedModelError, match="autograd"):
        model(tokens(1, 1), past_key_values=static, use_cache=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs() -> None:
    """What `generate` does by itself on a GPU: compile, record, replay."""
    torch.compiler.reset()
    model = copy.deepcopy(small_llama(head_size=64)).to("cuda")
    static = SparseBudgetCache(**SMALL, record=True, static=True)
    for seed, lengths in enumerate(([30, 11], [7, 40])):
        ids, real = (tensor.to("cuda") for tensor in left_padded(lengths, seed))
        usual = SparseBudgetCache(**SMALL, record=True)
        expected = decode(model, usual, ids, 40, attention_mask=real)
        static.reset()
        answer = decode(model, static, ids, 40, attention_mask=real)
        assert torch.equal(expected.sequences, answer.sequences)
        assert largest_difference(expected, answer) < 1e-3
        assert same(usual, static)

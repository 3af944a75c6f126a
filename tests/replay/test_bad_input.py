"""What replay refuses, in one sentence that says what to do."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from sparse_cache import EvictionTrace, SparseBudgetCache, UnsupportedModelError
from sparse_cache.replay import replay
from tests.cache.driving import SMALL, decode, small_llama, tokens

from .rollouts import Rollout, replayed, rollout


@pytest.fixture(scope="module")
def run() -> Rollout:
    return rollout(small_llama())


def test_unknown_way(run: Rollout) -> None:
    with pytest.raises(ValueError, match=r"way='sparse' is unknown.*gather"):
        replayed(small_llama(), run, "sparse")


def test_no_trace() -> None:
    with (
        pytest.raises(TypeError, match="trace must be an EvictionTrace"),
        replay(small_llama(), {}),
    ):
        pass


def test_no_model(run: Rollout) -> None:
    with (
        pytest.raises(TypeError, match="must be a transformers model"),
        replay(torch.nn.Linear(2, 2), run.trace),
    ):
        pass


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"layers": 3}, r"has budgets in layers \[0, 1\]"),
        ({"kv_heads": 4}, "2 KV heads in layer 0"),
    ],
)
def test_trace_of_another_model(run: Rollout, shape: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replayed(small_llama(**shape), run)


@pytest.mark.parametrize("columns", [slice(0, 50), slice(2, None)])
def test_other_lengths(run: Rollout, columns: slice) -> None:
    with (
        pytest.raises(ValueError, match="tokens, but the trace is of 3 rows of 69"),
        replay(small_llama(), run.trace),
    ):
        small_llama()(run.sequences[:, columns], attention_mask=run.mask[:, columns])


def test_other_rows(run: Rollout) -> None:
    with (
        pytest.raises(ValueError, match=r"2 rows of 70 tokens.*select_rows"),
        replay(small_llama(), run.trace),
    ):
        small_llama()(run.sequences[:2], attention_mask=run.mask[:2])


def test_other_padding_side(run: Rollout) -> None:
    with (
        pytest.raises(ValueError, match=r"column 0 of row 1 is a token.*aligned_to"),
        replay(small_llama(), run.trace),
    ):
        small_llama()(run.sequences, attention_mask=run.mask.flip(-1))


def test_forgotten_mask(run: Rollout) -> None:
    with (
        pytest.raises(ValueError, match="column 0 of row 1 is a token"),
        replay(small_llama(), run.trace),
    ):
        small_llama()(run.sequences)


def test_hole_in_the_mask(run: Rollout) -> None:
    mask = run.mask.clone()
    mask[0, 50] = 0
    with (
        pytest.raises(ValueError, match="column 50 of row 0 is padding, but it was a token"),
        replay(small_llama(), run.trace),
    ):
        small_llama()(run.sequences, attention_mask=mask)


def test_mask_of_another_shape(run: Rollout) -> None:
    mask = torch.ones(3, 1, 70, 70, dtype=torch.bool)
    with (
        pytest.raises(ValueError, match="must be the 2D mask"),
        replay(small_llama(), run.trace),
    ):
        small_llama()(run.sequences, attention_mask=mask)


def test_trace_with_holes(run: Rollout) -> None:
    deaths = [death.clone() for death in run.trace.deaths]
    deaths[1][0, 1, 45] = 0
    trace = EvictionTrace(deaths, run.trace.layer_indices, run.trace.tokens_seen)
    with pytest.raises(ValueError, match="45"), replay(small_llama(), trace):
        small_llama()(run.sequences, attention_mask=run.mask)


@pytest.mark.parametrize("cache", [DynamicCache, lambda: SparseBudgetCache(**SMALL)])
def test_a_cache_is_passed(run: Rollout, cache: Any) -> None:
    with (
        pytest.raises(ValueError, match="was passed inside of replay"),
        replay(small_llama(), run.trace),
    ):
        small_llama()(run.sequences, attention_mask=run.mask, past_key_values=cache())


def test_generate_inside(run: Rollout) -> None:
    with pytest.raises(ValueError, match="was passed inside"), replay(small_llama(), run.trace):
        decode(small_llama(), DynamicCache(), run.sequences, new_tokens=3)


def test_packed_texts(run: Rollout) -> None:
    positions = torch.arange(70).remainder(35).expand(3, -1)
    with pytest.raises(ValueError, match="one sequence a row"):
        replayed(small_llama(), run, position_ids=positions)


def test_shifted_positions_are_fine(run: Rollout) -> None:
    """transformers' own default for left-padded rows counts the padding too."""
    positions = torch.arange(70).expand(3, -1)
    assert torch.allclose(
        replayed(small_llama(), run, position_ids=positions)[0], replayed(small_llama(), run)[0]
    )


def test_the_model_is_not_called(run: Rollout) -> None:
    with (
        pytest.raises(RuntimeError, match="never called"),
        replay(small_llama(), run.trace),
    ):
        small_llama(seed=1)(run.sequences, attention_mask=run.mask)


def test_inside_of_a_compiled_function(run: Rollout) -> None:
    """It is served where the compiler breaks its graph at the hooks, and refused elsewhere."""
    model = small_llama()

    @torch.compile(backend="eager")
    def call(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(ids, attention_mask=mask).logits

    with torch.no_grad():
        expected = replayed(model, run)
        try:
            with replay(model, run.trace):
                found = call(run.sequences, run.mask)
        except RuntimeError as error:
            assert "compile the model alone" in str(error)
        else:
            real = run.mask.bool()
            assert torch.allclose(found[real], expected[real], atol=1e-4)
        dense = model(run.sequences, attention_mask=run.mask).logits
        again = call(run.sequences, run.mask)
    assert torch.allclose(again[run.mask.bool()], dense[run.mask.bool()], atol=1e-4)


def test_compiled_in_place(run: Rollout) -> None:
    model = copy.deepcopy(small_llama())
    model.compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match="compiled in place"):
        replayed(model, run)


def test_data_parallel(run: Rollout) -> None:
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        replayed(torch.nn.DataParallel(small_llama()), run)


def test_a_model_that_bypasses_the_attention_interface() -> None:
    from tests.architectures.build import build_tiny

    model, vocabulary, _ = build_tiny("xglm")
    cache = SparseBudgetCache(**SMALL, policy="keydiff", record=True)
    ids = torch.randint(3, vocabulary, (1, 30))
    model(ids, past_key_values=cache)
    with (
        pytest.raises(UnsupportedModelError, match=r"xglm computes attention itself"),
        replay(model, cache.trace()),
    ):
        model(ids)


def test_a_model_with_an_encoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with (
        pytest.raises(UnsupportedModelError, match="has an encoder"),
        replay(T5ForConditionalGeneration(config), rollout(small_llama()).trace),
    ):
        pass


def test_an_error_inside_leaves_nothing_behind(run: Rollout) -> None:
    model = small_llama()
    before = model(run.sequences, attention_mask=run.mask).logits
    with pytest.raises(IndexError), replay(model, run.trace):
        model(run.sequences + 1000, attention_mask=run.mask)
    assert torch.equal(model(run.sequences, attention_mask=run.mask).logits, before)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_another_thread_is_not_replayed(run: Rollout) -> None:
    model = small_llama()
    expected = model(run.sequences, attention_mask=run.mask).logits
    found = []

    def call() -> None:
        found.append(model(run.sequences, attention_mask=run.mask).logits)

    with torch.no_grad(), replay(model, run.trace):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        model(run.sequences, attention_mask=run.mask)
    assert torch.equal(found[0], expected)


def test_attention_that_is_not_plain_is_dense_or_refused() -> None:
    """Dropout in attention: the model's own function has to do it."""
    model = copy.deepcopy(small_llama())
    run = rollout(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with pytest.raises(UnsupportedModelError, match=r"dropout=0.5.*way='dense'"):
        replayed(model, run, "gather")
    torch.manual_seed(0)
    first = replayed(model, run)
    assert not torch.allclose(first, replayed(model, run))


def test_modules_that_were_replaced() -> None:
    """A forward that does not reach every layer of the trace is an error, not a dense result."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    cache = SparseBudgetCache(**SMALL, record=True)
    ids = tokens(1, 30)
    model(ids, past_key_values=cache)
    with replay(model, cache.trace()):
        model(ids)
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])
    with (
        pytest.raises(RuntimeError, match="did not run under the trace"),
        replay(model, cache.trace()),
    ):
        model(ids)

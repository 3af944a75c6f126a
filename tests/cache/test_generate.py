"""The features of `generate`, with a budget that is never reached and with one that is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, TextIteratorStreamer

from sparse_cache import SparseBudgetCache, UnsupportedModelError
from tests.tiny_model import byte_tokenizer, tiny_llama

from .driving import (
    LARGE,
    POLICIES,
    SMALL,
    decode,
    largest_difference,
    left_padded,
    small_llama,
    tokens,
)

BEAMS: dict[str, Any] = {"num_beams": 3}
FEATURES = {
    "sampling": {"do_sample": True, "temperature": 1.3},
    "several_answers": {"do_sample": True, "num_return_sequences": 3},
    "beams": BEAMS,
    "beams_with_sampling": {**BEAMS, "do_sample": True},
    "several_beams": {**BEAMS, "num_return_sequences": 2},
    "chunked_prefill": {"prefill_chunk_size": 7},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "repetition": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}


def prompt(feature: str) -> torch.Tensor:
    # Something for prompt lookup to find.
    return tokens(1, 10).repeat(1, 4) if feature == "prompt_lookup" else tokens(1, 40)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_same_as_dense_when_nothing_is_evicted(feature: str) -> None:
    model, ids = small_llama(), prompt(feature)
    torch.manual_seed(1)
    dense = decode(model, DynamicCache(), ids, **FEATURES[feature])
    torch.manual_seed(1)
    cache = SparseBudgetCache(**LARGE)
    sparse = decode(model, cache, ids, **FEATURES[feature])
    assert torch.equal(dense.sequences, sparse.sequences)
    assert largest_difference(dense, sparse) < 1e-4
    assert cache.stats().evictions == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("feature", FEATURES)
def test_under_a_budget_it_is_bounded(feature: str, policy: str) -> None:
    if (feature, policy) == ("prompt_lookup", "h2o"):
        return  # refused: see below
    model = small_llama()
    cache = SparseBudgetCache(**SMALL, policy=policy)
    output = decode(model, cache, prompt(feature), **FEATURES[feature])
    rows = FEATURES[feature].get("num_beams", FEATURES[feature].get("num_return_sequences", 1))
    assert output.sequences.shape[1] == 70
    # The last token was chosen but never processed; rejected guesses leave room behind them.
    assert 60 < cache.get_seq_length() <= 69
    assert all(len(layer.lengths) == rows for layer in cache.layers)
    if feature != "prompt_lookup":
        assert cache.get_seq_length() == 69
        assert cache.stats().tokens_kept < 25
        assert cache.stats().bytes_held == 2 * 2 * rows * 2 * 25 * 8 * 4


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "h2o"])
def test_guessing_ahead_changes_no_token(policy: str) -> None:
    """Greedy answers with prompt lookup and an assistant are those without, evictions included."""
    model, ids = small_llama(), prompt("prompt_lookup")
    assistant = small_llama(layers=1, seed=1)
    # The prompt's last token is processed apart from the prompt when the cache is asked to guess,
    # so the first eviction may see another window; with the prompt below the limit it does not.
    plain = decode(model, SparseBudgetCache(**{**SMALL, "budget": 60}, policy=policy), ids)
    for more in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant}):
        cache = SparseBudgetCache(**{**SMALL, "budget": 60}, policy=policy)
        guessed = decode(model, cache, ids, **more)
        dense = decode(model, DynamicCache(), ids, **more)
        assert dense.sequences.shape == guessed.sequences.shape == plain.sequences.shape
        # Up to the first eviction the three are one.
        assert torch.equal(guessed.sequences[:, :64], dense.sequences[:, :64])


def test_assisted_decoding_without_eviction_is_dense() -> None:
    model, ids = small_llama(), tokens(1, 40)
    assistant = small_llama(layers=1, seed=1)
    dense = decode(model, DynamicCache(), ids, assistant_model=assistant)
    sparse = decode(model, SparseBudgetCache(**LARGE), ids, assistant_model=assistant)
    assert torch.equal(dense.sequences, sparse.sequences)


def test_memory_grown_for_guesses_is_given_back() -> None:
    model, ids = small_llama(), prompt("prompt_lookup")
    cache = SparseBudgetCache(**SMALL)
    output = decode(model, cache, ids, prompt_lookup_num_tokens=4)
    turn = torch.cat([output.sequences, tokens(1, 9, seed=1)], dim=1)
    decode(model, cache, turn)
    assert cache.stats().bytes_held == 2 * 2 * 2 * 25 * 8 * 4
    assert cache.stats().tokens_kept < 25


@pytest.mark.parametrize("more", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": None}])
def test_h2o_refuses_to_guess(more: dict[str, Any]) -> None:
    if "assistant_model" in more:
        more = {"assistant_model": small_llama(layers=1, seed=1)}
    with pytest.raises(UnsupportedModelError, match="use another policy or no assistant"):
        cache = SparseBudgetCache(**SMALL, policy="h2o")
        decode(small_llama(), cache, prompt("prompt_lookup"), **more)


@pytest.mark.parametrize("policy", POLICIES)
def test_chunked_prefill_of_a_padded_batch_without_eviction(policy: str) -> None:
    model = small_llama()
    ids, real = left_padded([40, 23, 4])
    more = {"attention_mask": real, "prefill_chunk_size": 9}
    dense = decode(model, DynamicCache(), ids, attention_mask=real)
    sparse = decode(model, SparseBudgetCache(**LARGE, policy=policy), ids, **more)
    assert torch.equal(dense.sequences, sparse.sequences)
    assert largest_difference(dense, sparse) < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_embeddings_in_place_of_tokens(policy: str) -> None:
    model, ids = small_llama(), tokens(2, 40)
    by_ids = decode(model, SparseBudgetCache(**SMALL, policy=policy), ids)
    embeds = model.get_input_embeddings()(ids).detach()
    output = model.generate(
        inputs_embeds=embeds,
        attention_mask=torch.ones_like(ids),
        past_key_values=SparseBudgetCache(**SMALL, policy=policy),
        max_new_tokens=30,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(output, by_ids.sequences[:, 40:])


def test_a_streamer_gets_the_text_that_is_returned() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    inputs = tokenizer("a text that is longer than the budget", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    result: list[torch.Tensor] = []

    def work() -> None:
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            past_key_values=SparseBudgetCache(**SMALL),
            max_new_tokens=40,
            do_sample=False,
            streamer=streamer,
            pad_token_id=256,
        )
        result.append(output[0])

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(result[0])
    assert len(result[0]) == inputs["input_ids"].shape[1] + 40


@pytest.mark.parametrize("policy", ["rkv", "h2o", "knorm"])
def test_threads_on_one_model(policy: str) -> None:
    """Each thread gets what it would have got alone; one of them uses a dense cache."""
    model = small_llama()
    prompts = [tokens(1, length, seed=length) for length in (40, 33, 12, 29)]

    def answer(number: int) -> torch.Tensor:
        dense = number == 3
        cache = DynamicCache() if dense else SparseBudgetCache(**SMALL, policy=policy)
        return torch.stack(decode(model, cache, prompts[number]).logits)

    wanted = [answer(number) for number in range(4)]
    got: dict[int, torch.Tensor] = {}
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        got[number] = answer(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(wanted[number], got[number]) for number in range(4))


@pytest.mark.parametrize("policy", POLICIES)
def test_inference_mode_and_outside_of_it(policy: str) -> None:
    model, ids = small_llama(), tokens(1, 60)
    plain, mixed = (SparseBudgetCache(**SMALL, policy=policy) for _ in range(2))
    for step, (start, stop) in enumerate([(0, 40), *((n, n + 1) for n in range(40, 60))]):
        with torch.no_grad():
            expected = model(ids[:, start:stop], past_key_values=plain).logits
        with torch.inference_mode(step % 2 == 0), torch.no_grad():
            got = model(ids[:, start:stop], past_key_values=mixed).logits
        assert torch.equal(expected, got.clone())


def test_gradients_do_not_reach_into_the_cache() -> None:
    model, ids = small_llama(seed=3), tokens(1, 40)
    cache = SparseBudgetCache(**SMALL)
    model(ids[:, :30], past_key_values=cache)
    model(ids[:, 30:31], past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
    assert not cache.layers[0].keys.requires_grad
    model.zero_grad()

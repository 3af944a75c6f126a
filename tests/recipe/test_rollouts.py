"""Rollouts: what is sampled, from which distribution, and within which memory."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_cache import SparseBudgetCache
from sparse_cache.recipe.prompts import Prompts, encode
from sparse_cache.recipe.rollouts import Sampler
from sparse_cache.recipe.tasks import Example, open_task, recall_tokenizer
from sparse_cache.replay import rollout_logprobs
from tests.recipe.tiny_run import save_tiny_model

TOKENIZER = recall_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def _sampler(**changes: Any) -> Sampler:
    settings: dict[str, Any] = {
        "group": 3,
        "new_tokens": 24,
        "temperature": 0.8,
        "end_ids": [TOKENIZER.eos_token_id],
        "pad_id": TOKENIZER.pad_token_id,
    }
    return Sampler(**(settings | changes))


def _prompts(count: int = 4) -> dict[str, torch.Tensor]:
    task = open_task("recall-mixed")
    return dict(encode(TOKENIZER, [task.train[index] for index in range(count)]))


def _sparse() -> SparseBudgetCache:
    return SparseBudgetCache(budget=20, interval=4, window=4, sinks=0, record=True)


def test_log_probabilities_are_those_of_the_sampled_distribution(model: Any) -> None:
    torch.manual_seed(0)
    # Penalties in the model's own generation config must not creep in.
    model.generation_config.repetition_penalty = 1.7
    model.generation_config.top_k = 3
    try:
        rollouts = _sampler().sample(model, _prompts(), _sparse)
    finally:
        assert model.generation_config.repetition_penalty == 1.7
        model.generation_config.repetition_penalty = None
        model.generation_config.top_k = None
    found = rollout_logprobs(
        model,
        rollouts.sequences,
        rollouts.trace,
        attention_mask=rollouts.attention_mask,
        start=rollouts.start,
        temperature=0.8,
    ).logprobs
    torch.testing.assert_close(found, rollouts.sampled, atol=1e-4, rtol=0)
    assert len(rollouts) == 12
    assert rollouts.bytes_held < rollouts.bytes_dense


def test_several_end_tokens(model: Any) -> None:
    torch.manual_seed(0)
    ends = [TOKENIZER.eos_token_id, *range(7, 9)]
    rollouts = _sampler(end_ids=ends, new_tokens=8).sample(model, _prompts(), lambda: None)
    is_end = torch.isin(rollouts.sequences[:, rollouts.start :], torch.tensor(ends))
    for row in range(len(rollouts)):
        length = int(rollouts.lengths[row])
        assert bool(rollouts.truncated[row]) == (not bool(is_end[row, :length].any()))
        assert not bool(is_end[row, : length - 1].any())
        assert bool((rollouts.sequences[row, rollouts.start + length :] == 0).all())
        assert int(rollouts.attention_mask[row, rollouts.start :].sum()) == length
    assert 0 < int(rollouts.truncated.sum()) < len(rollouts)


def test_bytes_of_a_dense_rollout_are_those_of_its_cache(model: Any) -> None:
    torch.manual_seed(0)
    sampler = _sampler(end_ids=[35])
    dense = sampler.sample(model, _prompts(), lambda: None)
    columns = dense.sequences.shape[1] - 1
    # Keys and values, layers, rows, heads, tokens, head size, bytes.
    expected = 2 * 3 * 12 * 2 * columns * 16 * 4
    assert dense.bytes_held == dense.bytes_dense == expected
    torch.manual_seed(0)
    sparse = sampler.sample(model, _prompts(), _sparse)
    assert sparse.bytes_held <= expected * 24 / columns


def test_memory_that_runs_out_halves_the_calls(model: Any) -> None:
    """Rollouts of several calls fit together, with their traces."""
    ends = [TOKENIZER.eos_token_id, *range(7, 12)]
    sampler = _sampler(end_ids=ends)
    generate, sizes = model.generate, []

    def scarce(self: Any, **inputs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(**inputs)

    model.generate = types.MethodType(scarce, model)
    try:
        torch.manual_seed(0)
        rollouts = sampler.sample(model, _prompts(), _sparse)
    finally:
        del model.generate
    assert sizes == [4, 2, 1, 1, 1, 1]
    assert sampler.rows == 3
    found = rollout_logprobs(
        model,
        rollouts.sequences,
        rollouts.trace,
        attention_mask=rollouts.attention_mask,
        start=rollouts.start,
        temperature=0.8,
    ).logprobs
    torch.testing.assert_close(found, rollouts.sampled, atol=1e-4, rtol=0)


def test_memory_for_no_prompt_at_all_says_what_to_lower(model: Any) -> None:
    def never(self: Any, **inputs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model.generate = types.MethodType(never, model)
    try:
        with pytest.raises(RuntimeError, match="lower group=3, new_tokens=24 or the budget"):
            _sampler().sample(model, _prompts(), _sparse)
    finally:
        del model.generate


def test_a_part_of_the_rollouts_is_cut_to_its_longest(model: Any) -> None:
    torch.manual_seed(0)
    ends = [TOKENIZER.eos_token_id, *range(7, 17)]
    rollouts = _sampler(end_ids=ends).sample(model, _prompts(), _sparse)
    rows = rollouts.lengths.argsort()[:5]
    part = rollouts.select(rows)
    assert part.mask.shape[1] == int(rollouts.lengths[rows].max()) < rollouts.mask.shape[1]
    found = rollout_logprobs(
        model,
        part.sequences,
        part.trace,
        attention_mask=part.attention_mask,
        start=part.start,
        temperature=0.8,
    ).logprobs
    torch.testing.assert_close(found, part.sampled, atol=1e-4, rtol=0)


def test_prompts_are_shared_out_and_come_round() -> None:
    examples = [Example(str(number), None, str(number)) for number in range(10)]

    def of(rank: int, world: int, step: int, seed: int = 0) -> list[str]:
        prompts = Prompts(examples, 4, seed=seed, rank=rank, world=world)
        return [example.id for example in prompts.of_step(step)]

    both = [of(rank, 2, step) for step in range(5) for rank in (0, 1)]
    flat = [name for part in both for name in part]
    assert flat == [name for step in range(5) for name in of(0, 1, step)]
    assert sorted(flat[:10]) == sorted(flat[10:]) == [str(number) for number in range(10)]
    assert of(0, 1, 0) != of(0, 1, 0, seed=1)
    with pytest.raises(ValueError, match="multiple of the 3 processes"):
        Prompts(examples, 4, seed=0, world=3)


def test_prompts_that_are_too_long_give_their_place() -> None:
    examples = [Example("x" * number, None, str(number)) for number in range(1, 11)]
    prompts = Prompts(examples, 10, seed=0, fits=lambda example: len(example.prompt) < 6)
    assert all(int(example.id) < 6 for example in prompts.of_step(0))
    assert prompts.left_out > 0
    with pytest.raises(ValueError, match="longer than prompt_tokens"):
        Prompts(examples, 10, seed=0, fits=lambda example: False).of_step(0)

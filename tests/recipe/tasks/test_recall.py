"""The procedural task of the tiny preset, its tokenizer and its warm start's material."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_cache import NEVER
from sparse_cache.recipe.tasks import RecallTask, open_task, recall_tokenizer
from sparse_cache.recipe.tasks.recall import VOCABULARY, solution
from sparse_cache.recipe.tiny_model import _answers, _copies, random_trace, tiny_model

TASK = RecallTask()


def test_an_answer_by_hand() -> None:
    example = TASK.train[0]
    prompt = str(example.prompt).split()
    values = dict(zip(prompt[0:16:2], prompt[1:16:2], strict=True))
    asked = prompt[17:21]
    first, second, third, fourth = asked
    total, steps = 0, []
    for key in (third, first, fourth, second):
        new = (total + int(values[key])) % 10
        steps += [key, values[key], "+", str(total), "=", str(new)]
        total = new
    right = " ".join([*steps, "#", str(total)])
    assert len(prompt) == 22
    assert len(right.split()) + 1 == 27
    assert TASK.reward(example, right) == 1.0
    for place in range(len(right.split())):
        words = right.split()
        words[place] = "?" if words[place] != "?" else "+"
        assert TASK.reward(example, " ".join(words)) == 0.0
    assert TASK.reward(example, "") == 0.0
    assert TASK.reward(example, right + " " + right) == 0.0
    assert TASK.reward(example, f"# {total}") == 0.0


@settings(max_examples=60, deadline=None)
@given(index=st.integers(0, 9999), seed=st.integers(0, 5), mixed=st.booleans())
def test_every_order_is_right_and_every_wrong_value_is_not(
    index: int, seed: int, mixed: bool
) -> None:
    task = open_task("recall-mixed" if mixed else "recall", seed=seed)
    example = task.train[index]
    assert example == task.train[index]
    order = list(example.answer.values)
    random.Random(index).shuffle(order)
    right = solution(example.answer, order)
    assert task.reward(example, right) == 1.0
    words = right.split()
    words[1] = str((int(words[1]) + 1) % 10)
    assert task.reward(example, " ".join(words)) == 0.0
    if len(order) > 1:
        assert task.reward(example, solution(example.answer, [order[0], *order[:-1]])) == 0.0


def test_held_out_prompts_are_not_trained_on() -> None:
    trained = {str(TASK.train[index].prompt) for index in range(3000)}
    assert not trained & {str(TASK.held_out[index].prompt) for index in range(300)}


def test_the_tokenizer_keeps_every_word() -> None:
    tokenizer = recall_tokenizer()
    assert len(tokenizer) == 36
    text = str(TASK.train[3].prompt)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    inputs = tokenizer([text, "a 3 ? a ?"], padding=True)
    assert inputs["attention_mask"][1][0] == 0
    assert tokenizer.padding_side == "left"
    assert VOCABULARY[tokenizer.eos_token_id] == "<end>"


def test_labels_of_the_warm_start_are_answers_only() -> None:
    tokenizer = recall_tokenizer()
    task = open_task("recall-mixed")
    assert isinstance(task, RecallTask)
    ids, mask, labels = _answers(tokenizer, task, 16, random.Random(0))
    for row in range(16):
        answer = ids[row][labels[row] >= 0]
        prompt = ids[row][(labels[row] < 0) & (mask[row] == 1)]
        assert tokenizer.decode(prompt).count("?") == 2
        assert tokenizer.decode(prompt).endswith("?")
        assert int(answer[-1]) == tokenizer.eos_token_id
    ids, labels = _copies(36, 4, random.Random(0), torch.Generator().manual_seed(0))
    length = int((labels[0] < 0).sum())
    assert torch.equal(ids[:, :length], ids[:, length : 2 * length])
    assert torch.equal(labels[:, length:], ids[:, length:])


def test_random_traces_are_such_as_a_cache_could_record() -> None:
    mask = torch.ones(8, 40, dtype=torch.int64)
    mask[1, :7] = 0
    generator = torch.Generator().manual_seed(0)
    trace = random_trace(tiny_model(36, 1, 0), mask, generator)
    trace.validate()
    assert torch.equal(trace.real, mask.bool())
    died = torch.stack([(death < NEVER) & (death > 0) for death in trace.deaths]).float()
    assert 0.02 < float(died.mean()) < 0.3


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pairs=\(3, 40\)"):
        RecallTask(pairs=(3, 40))
    with pytest.raises(ValueError, match=r"queries=\(1, 9\)"):
        RecallTask(queries=(1, 9))
    with pytest.raises(ValueError, match="did you mean recall-mixed"):
        open_task("recal-mixed")

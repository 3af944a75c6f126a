"""reasoning-gym's datasets as tasks."""

from __future__ import annotations

import time

import pytest

from sparse_cache.recipe.tasks.reasoning_gym import INSTRUCTION, reasoning_gym_task
from sparse_cache.recipe.tasks.task import Task

gym = pytest.importorskip("reasoning_gym")


def test_a_dataset_is_a_task() -> None:
    task: Task = reasoning_gym_task("chain_sum", size=20, seed=3, held_out_size=5)
    assert (task.name, len(task.train), len(task.held_out)) == ("chain_sum", 20, 5)
    entry = gym.create_dataset("chain_sum", size=25, seed=3)[7]
    example = task.train[7]
    assert example.prompt == f"{entry['question']}\n\n{INSTRUCTION}"
    assert (example.answer, example.id) == (entry, "chain_sum-7")
    assert task.train[-1] == task.train[19]
    assert [one.id for one in task.train] == [f"chain_sum-{n}" for n in range(20)]
    with pytest.raises(IndexError):
        task.train[20]
    right = entry["answer"]
    assert task.reward(example, f"It is\n<answer>{right}</answer>\nBye.") == 1.0
    assert task.reward(example, f"It is\n{right}") == 1.0
    assert task.reward(example, f"{right}\n<answer>x</answer>") == 0.0
    assert task.reward(example, "") == 0.0


def test_seeds() -> None:
    one, same, other = (
        [example.prompt for example in reasoning_gym_task("letter_counting", 10, seed).train]
        for seed in (1, 1, 1000)
    )
    assert one == same
    assert not set(one) & set(other)


def test_held_out_questions_are_never_trained_on() -> None:
    """A coin has few questions to ask."""
    task = reasoning_gym_task("needle_haystack", 10, 0, held_out_size=5)
    assert not {e.prompt for e in task.train} & {e.prompt for e in task.held_out}
    task = reasoning_gym_task("coin_flip", 60, 0, held_out_size=20)
    assert not {e.prompt for e in task.train} & {e.prompt for e in task.held_out}


@pytest.mark.parametrize("name", ["graph_color", "word_ladder"])
def test_rewards_are_the_dataset_s(name: str) -> None:
    task = reasoning_gym_task(name, 3, 0, held_out_size=2)
    dataset = gym.create_dataset(name, size=5, seed=0)
    for example in task.held_out:
        for answer in (example.answer["answer"] or "1", "certainly not", "0"):
            expected = min(1.0, max(0.0, dataset.score_answer(answer, example.answer)))
            given = task.reward(example, f"<answer>{answer}</answer>")
            assert given == pytest.approx(expected)


def test_an_answer_the_scorer_fails_at_gets_zero() -> None:
    task = reasoning_gym_task("prime_factorization", 3, 0, held_out_size=2)
    example = task.train[0]
    with pytest.raises(ValueError):
        gym.create_dataset("prime_factorization").score_answer("twelve", example.answer)
    assert task.reward(example, "twelve") == 0.0
    assert task.unscored == 1
    assert task.reward(example, example.answer["answer"]) == 1.0


def test_endless_scoring_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_cache.recipe.tasks.reasoning_gym.LIMIT_S", 0.3)
    task = reasoning_gym_task("countdown", 3, 0, held_out_size=2)
    task.reward(task.train[0], "1 + 1")
    start = time.monotonic()
    assert task.reward(task.train[0], "9**9**9**9") == 0.0
    assert time.monotonic() - start < 2.5
    assert task.unscored == 1


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match="no dataset 'chainsum'; did you mean 'chain_sum'"):
        reasoning_gym_task("chainsum", 3, 0)
    with pytest.raises(ValueError, match=r"see reasoning_gym\.factory\.DATASETS"):
        reasoning_gym_task("%%%%", 3, 0)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        reasoning_gym_task("chain_sum", 0, 0)
    with pytest.raises(ValueError, match="held_out_size=0 must be at least 1"):
        reasoning_gym_task("chain_sum", 3, 0, held_out_size=0)
    with pytest.raises(ValueError, match="'composite' cannot be made"):
        reasoning_gym_task("composite", 3, 0)

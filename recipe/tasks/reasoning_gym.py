"""Tasks of reasoning-gym by name: procedural puzzles that score their answers themselves.

They are scored in processes of their own, within a time limit: `countdown` computes whatever a
model writes, and `9**9**9**9` takes for ever.
"""

from __future__ import annotations

import difflib
import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..verifiers.final_answer import final_answer, response, tagged_answer
from ..verifiers.optional import import_optional
from ..verifiers.worker_pool import RequestFailed, RequestTooLong, WorkerPool
from .task import Example

logger = logging.getLogger(__name__)

INSTRUCTION = "Give the final answer between <answer> and </answer>."
LIMIT_S = 5.0


class _Entries(Sequence[Example]):
    """Examples that are made when asked for, without those whose question is held out."""

    def __init__(
        self, name: str, dataset: Any, numbers: range, left_out: frozenset[str] = frozenset()
    ) -> None:
        self._name, self._dataset, self._numbers = name, dataset, numbers
        self._left_out = left_out

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        size = len(self._numbers)
        if not -size <= index < size:
            raise IndexError(index)
        for step in range(size):
            number = self._numbers[(index + step) % size]
            entry = self._dataset[number]
            if entry["question"] not in self._left_out:
                prompt = f"{entry['question']}\n\n{INSTRUCTION}"
                return Example(prompt, entry, f"{self._name}-{number}")
        raise ValueError(
            f"reasoning-gym's {self._name!r} has too few different questions: all {size} to train "
            "on are held out too."
        )


class ReasoningGymTask:
    """A dataset of reasoning-gym; see `reasoning_gym_task`, which makes it.

    Attributes:
        name: the dataset's.
        train: examples to train on. An example's answer is the dataset's entry.
        held_out: examples never trained on.
        unscored: completions that the dataset's scorer failed at or did not score in time.
    """

    def __init__(self, name: str, size: int, held_out_size: int, seed: int, dataset: Any) -> None:
        self.name = name
        self._arguments = name, size + held_out_size, seed
        self.held_out: Sequence[Example] = list(
            _Entries(name, dataset, range(size, size + held_out_size))
        )
        questions = frozenset(example.answer["question"] for example in self.held_out)
        self.train: Sequence[Example] = _Entries(name, dataset, range(size), questions)
        handler = Path(__file__).with_name("reasoning_gym_worker.py")
        self._pool = WorkerPool(handler, limit=LIMIT_S)
        self._lock = threading.Lock()
        self.unscored = 0

    def reward(self, example: Example, completion: str) -> float:
        """The dataset's own score of a completion's answer, kept within 0 and 1.

        The answer is what the last `<answer>` encloses, else the last line. One that the scorer
        fails at (some raise at text that is no number) or that takes it more than 5 s gets 0.

        Raises:
            RuntimeError: no process can be started.
        """
        text = response(completion)
        tagged = tagged_answer(text)
        answer = final_answer(completion) if tagged is None else tagged
        if not answer:
            return 0.0
        try:
            score = float(self._pool.ask((*self._arguments, answer, example.answer)))
        except (RequestTooLong, RequestFailed) as error:
            with self._lock:
                self.unscored += 1
                first = self.unscored == 1
            if first:
                logger.warning(
                    "reasoning-gym's %s could not score the answer %.80r of %s (%s); such answers "
                    "get 0.",
                    self.name,
                    answer,
                    example.id,
                    error,
                )
            return 0.0
        return 0.0 if math.isnan(score) else min(1.0, max(0.0, score))

    def close(self) -> None:
        """End the idle processes; the next completion starts others."""
        self._pool.close()


def reasoning_gym_task(
    name: str, size: int = 10_000, seed: int = 0, held_out_size: int = 200
) -> ReasoningGymTask:
    """The task that reasoning-gym knows by this name.

    Args:
        name: of the dataset, as in `chain_sum`.
        size: examples to train on.
        seed: another seed, far enough away, gives other examples. (Example `i` under seed `s` is
            example `i - 1` under seed `s + 1`, which is why the held-out examples are further ones
            of the same seed.)
        held_out_size: examples never trained on; training skips their questions.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: the name is unknown (the message says the nearest), an argument is out of
            range, or the dataset cannot be made from a name alone.
    """
    gym = import_optional("reasoning_gym", "reasoning-gym", f"task {name!r} of reasoning-gym")
    known = sorted(gym.factory.DATASETS)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
        guess = f"did you mean {near[0]!r}?" if near else "see reasoning_gym.factory.DATASETS."
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {guess}")
    for argument, value in (("size", size), ("held_out_size", held_out_size)):
        if value < 1:
            raise ValueError(f"{argument}={value} must be at least 1.")
    try:
        dataset = gym.create_dataset(name, size=size + held_out_size, seed=seed)
        return ReasoningGymTask(name, size, held_out_size, seed, dataset)
    except (AssertionError, IndexError) as error:
        raise ValueError(
            f"reasoning-gym's {name!r} cannot be made with size={size} and "
            f"held_out_size={held_out_size}: {error}."
        ) from error

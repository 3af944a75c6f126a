"""Recall and add: a procedural task whose answers are longer than a small budget and need tokens
from the very beginning of the prompt.

    a 3 m 7 c 0 k 5 ? m k      ->      m 7 + 0 = 7 k 5 + 7 = 2 # 2

A prompt lists keys with their values, then asks for some of them. The answer goes through the asked
keys, in any order, recalls each value and adds it to the running sum (modulo 10), and ends with the
total. So what was evicted too early cannot be guessed, and the order is the policy's choice.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .task import Example

KEYS = string.ascii_lowercase[:19]
DIGITS = string.digits
PAD, END, QUERY, PLUS, EQUALS, TOTAL = "<pad>", "<end>", "?", "+", "=", "#"
VOCABULARY = [PAD, END, QUERY, PLUS, EQUALS, TOTAL, "<unknown>", *DIGITS, *KEYS]
MODULUS = 10


@dataclass(frozen=True)
class RecallAnswer:
    """Values of the asked keys, by key."""

    values: dict[str, int]

    @property
    def total(self) -> int:
        """Their sum modulo 10."""
        return sum(self.values.values()) % MODULUS


class _Drawn(Sequence[Example]):
    """Examples that are drawn when asked for: number `i` is always the same."""

    def __init__(
        self, name: str, size: int, seed: int, pairs: tuple[int, int], queries: tuple[int, int]
    ) -> None:
        self._name, self._size, self._seed = name, size, seed
        self._pairs, self._queries = pairs, queries

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        if not 0 <= index < self._size:
            raise IndexError(index)
        generator = random.Random(f"{self._name}/{self._seed}/{index}")
        return draw_example(
            generator,
            generator.randint(*self._pairs),
            generator.randint(*self._queries),
            f"{self._name}-{index}",
        )


def draw_example(generator: random.Random, pairs: int, queries: int, id: str = "") -> Example:
    """One prompt with `pairs` keys of which `queries` are asked for."""
    keys = generator.sample(KEYS, pairs)
    values = {key: generator.randrange(MODULUS) for key in keys}
    asked = generator.sample(keys, queries)
    listed = " ".join(f"{key} {values[key]}" for key in keys)
    prompt = f"{listed} {QUERY} {' '.join(asked)} {QUERY}"
    return Example(prompt, RecallAnswer({key: values[key] for key in asked}), id)


def solution(answer: RecallAnswer, order: Sequence[str]) -> str:
    """The one right completion that goes through the keys in this order."""
    parts, total = [], 0
    for key in order:
        new = (total + answer.values[key]) % MODULUS
        parts.append(f"{key} {answer.values[key]} {PLUS} {total} {EQUALS} {new}")
        total = new
    return f"{' '.join(parts)} {TOTAL} {total}"


class RecallTask:
    """The task `recall` (all answers equally long) or `recall-mixed` (lengths vary).

    Args:
        name: of the task.
        pairs: fewest and most keys of a prompt.
        queries: fewest and most keys asked for.
        train_size: examples to train on.
        held_out_size: examples never trained on.
        seed: another seed gives other examples.

    Raises:
        ValueError: more keys are asked for than there can be.
    """

    def __init__(
        self,
        name: str = "recall",
        *,
        pairs: tuple[int, int] = (8, 8),
        queries: tuple[int, int] = (4, 4),
        train_size: int = 1_000_000,
        held_out_size: int = 10_000,
        seed: int = 0,
    ) -> None:
        if not 1 <= pairs[0] <= pairs[1] <= len(KEYS):
            raise ValueError(f"pairs={pairs} must be ascending and lie between 1 and {len(KEYS)}.")
        if not 1 <= queries[0] <= queries[1] <= pairs[0]:
            raise ValueError(
                f"queries={queries} must be ascending and at most the fewest pairs, {pairs[0]}."
            )
        self.name, self.pairs, self.queries = name, pairs, queries
        self.train: Sequence[Example] = _Drawn(f"{name}-train", train_size, seed, pairs, queries)
        self.held_out: Sequence[Example] = _Drawn(
            f"{name}-held-out", held_out_size, seed, pairs, queries
        )

    def reward(self, example: Example, completion: str) -> float:
        """1 if the completion goes through every asked key once with its value and adds up, else 0.

        A reward for the total alone would pay for guesses, and a policy under eviction then learns
        to guess.
        """
        answer: RecallAnswer = example.answer
        words = completion.split()
        order = words[: -2 or None : 6]
        if sorted(order) != sorted(answer.values):
            return 0.0
        return float(completion.split() == solution(answer, order).split())

    def supervised(self, generator: random.Random) -> tuple[str, str]:
        """A prompt and a right completion, through the keys in a random order."""
        pairs = generator.randint(*self.pairs)
        example = draw_example(generator, pairs, generator.randint(*self.queries))
        order = generator.sample(list(example.answer.values), len(example.answer.values))
        assert isinstance(example.prompt, str)
        return example.prompt, solution(example.answer, order)


def recall_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; pads on the left."""
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token="<unknown>",
        padding_side="left",
    )

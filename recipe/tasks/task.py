"""What a task is to the recipe: prompts, a held-out split and a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Example:
    """One prompt with what its answer is judged by."""

    prompt: str | list[dict[str, str]]
    """Text, or chat messages with `role` and `content`, which the tokenizer's template renders."""
    answer: Any
    """What the task's verifier compares a completion with."""
    id: str
    """Names the example in messages and logs."""


class Task(Protocol):
    """Anything with these four members can be trained on."""

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    """Examples that are never trained on."""

    def reward(self, example: Example, completion: str) -> float:
        """How good a completion is, from 0 to 1."""
        ...

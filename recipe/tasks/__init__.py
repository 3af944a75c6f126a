"""Tasks: prompts, a held-out split and a reward."""

from __future__ import annotations

import difflib
from pathlib import Path

from .jsonl import jsonl_task
from .reasoning_gym import reasoning_gym_task
from .recall import RecallTask, recall_tokenizer
from .task import Example, Task

PROCEDURAL = ("recall", "recall-mixed")
GYM = "reasoning-gym:"

__all__ = ["Example", "RecallTask", "Task", "open_task", "recall_tokenizer"]


def open_task(
    name: str, *, seed: int = 0, verifier: str = "math", held_out: str | None = None
) -> Task:
    """A task by name.

    Args:
        name: `recall` or `recall-mixed`, `reasoning-gym:NAME`, or the path of a JSONL file.
        seed: of procedural tasks.
        verifier: of a JSONL file.
        held_out: a second JSONL file to evaluate on; None: a part of the first is split off.

    Raises:
        FileNotFoundError, ValueError: there is no such task, or its file has faults.
    """
    if name == "recall":
        return RecallTask(seed=seed)
    if name == "recall-mixed":
        return RecallTask(name, pairs=(6, 10), queries=(1, 6), seed=seed)
    if name.startswith(GYM):
        return reasoning_gym_task(name.removeprefix(GYM), seed=seed)
    if name.endswith(".jsonl") or Path(name).is_file():
        return jsonl_task(name, verifier, 0.1 if held_out is None else held_out)
    near = difflib.get_close_matches(name, PROCEDURAL, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
        f"task {name!r} is unknown; {guess}known: {', '.join(PROCEDURAL)}, {GYM}NAME, or the path "
        "of a JSONL file."
    )

"""Tasks from files of prompts and answers, one JSON object a line.

The fields of GSM8K, SVAMP and MATH and chat prompts are recognised; others are named.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..verifiers import Verifier, get_verifier
from ..verifiers.final_answer import references
from .task import Example

logger = logging.getLogger(__name__)

PROMPT_FIELDS = (("Body", "Question"), ("question",), ("problem",), ("prompt",))
"""SVAMP, GSM8K, MATH, chats. Several fields are joined by a space."""
ANSWER_FIELDS = ("answer", "Answer", "label")


class JsonlTask:
    """Prompts and answers of a file; see `jsonl_task`, which makes it.

    Attributes:
        name: the file's name without its ending.
        train: examples to train on, in the order of the file.
        held_out: examples never trained on.
    """

    def __init__(
        self, name: str, train: Sequence[Example], held_out: Sequence[Example], verifier: Verifier
    ) -> None:
        self.name, self.train, self.held_out = name, train, held_out
        self._verifier = verifier

    def reward(self, example: Example, completion: str) -> float:
        """What the verifier says of a completion; see there for what it raises."""
        return self._verifier(completion, example.answer)


def jsonl_task(
    path: str | os.PathLike[str],
    verifier: str | Verifier = "math",
    held_out: float | str | os.PathLike[str] = 0.1,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    limit: int | None = None,
) -> JsonlTask:
    """The task in a file of JSON lines.

    Args:
        path: each line is an object with a prompt (text, or a list of chat messages) and an answer
            (text, a number, or a list of them of which any will do; for a verifier of yours
            anything but null). Empty lines are skipped.
        verifier: a name (see `get_verifier`) or a function of a completion and an answer.
        held_out: share of the prompts to hold out, chosen by a hash of the prompt: the same prompts
            in any order of lines, under any seed and on any machine, and a prompt that occurs
            twice is never on both sides. Or the path of a second file, whose prompts are then left
            out of training.
        prompt_field: field with the prompt; default: recognised.
        answer_field: field with the answer; default: recognised.
        limit: read so many examples of each file at most.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no examples or a line that is none (the message names file and
            line), fields are not recognised, an argument is out of range, or a verifier unknown.
        TypeError: the verifier is neither a name nor a function.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1.")
    share = held_out if isinstance(held_out, int | float) else None
    if share is not None and not 0 < share < 1:
        raise ValueError(
            f"held_out={held_out} must be a share between 0 and 1, or the path of a second file."
        )
    if isinstance(verifier, str):
        judge = get_verifier(verifier)
        any_answer = ":" in verifier
    elif callable(verifier):
        judge, any_answer = verifier, True
    else:
        raise TypeError(f"verifier must be a name or a function, got {type(verifier).__name__}.")
    reader = _Reader(prompt_field, answer_field, any_answer, limit)
    path = Path(path)
    examples = reader.read(path)
    if share is not None:
        train, kept = _split(examples, share, path)
    else:
        second = Path(held_out)  # type: ignore[arg-type]
        kept = reader.read(second)
        train = _without(examples, kept, path, second)
    return JsonlTask(path.stem, train, kept, judge)


@dataclass(frozen=True)
class _Reader:
    """How lines become examples."""

    prompt_field: str | None
    answer_field: str | None
    any_answer: bool
    limit: int | None

    def read(self, path: Path) -> list[Example]:
        """The examples of a file."""
        if not path.is_file():
            what = "is a folder; name the file" if path.is_dir() else "does not exist"
            raise FileNotFoundError(f"Task file {path} {what}.")
        examples: list[Example] = []
        fields: tuple[tuple[str, ...], str] | None = None
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if len(examples) == self.limit:
                    break
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                row = _row(line, where)
                fields = fields or (self._prompt_fields(row, where), self._answer_field(row, where))
                prompt = _prompt(row, fields[0], where)
                answer = _answer(row, fields[1], where, self.any_answer)
                examples.append(Example(prompt, answer, f"{path.name}:{number}"))
        if not examples:
            raise ValueError(f"{path}: the file has no examples.")
        return examples

    def _prompt_fields(self, row: dict[str, Any], where: str) -> tuple[str, ...]:
        if self.prompt_field is not None:
            return (_named(row, self.prompt_field, "prompt", where),)
        found = [names for names in PROMPT_FIELDS if all(name in row for name in names)]
        return _the_one(found, row, "prompt", where, "+".join)

    def _answer_field(self, row: dict[str, Any], where: str) -> str:
        if self.answer_field is not None:
            return _named(row, self.answer_field, "answer", where)
        return _the_one([name for name in ANSWER_FIELDS if name in row], row, "answer", where, str)


def _named(row: dict[str, Any], name: str, what: str, where: str) -> str:
    if name in row:
        return name
    near = difflib.get_close_matches(name, list(row), n=1)
    guess = f"did you mean {near[0]!r}?" if near else f"it has {_listed(row)}."
    raise ValueError(f"{where}: there is no field {what}_field={name!r}; {guess}")


def _the_one(
    found: Sequence[Any], row: dict[str, Any], what: str, where: str, spell: Callable[[Any], str]
) -> Any:
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(map(spell, found))
        raise ValueError(f"{where}: the {what} could be {names}; set {what}_field.")
    raise ValueError(
        f"{where}: none of the fields {_listed(row)} is known to be the {what}; set {what}_field."
    )


def _listed(row: dict[str, Any]) -> str:
    return ", ".join(map(repr, row)) or "none"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: the line is not UTF-8 ({error.reason}).") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: the line is not valid JSON ({error}).") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: the line is a JSON {_kind(row)}; an object is needed.")
    return row


def _kind(value: Any) -> str:
    """What JSON calls it."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"{where}: the field {name!r} is {'null' if name in row else 'missing'}.")
    return row[name]


def _prompt(row: dict[str, Any], names: tuple[str, ...], where: str) -> str | list[dict[str, str]]:
    parts = [_field(row, name, where) for name in names]
    if len(parts) == 1 and isinstance(parts[0], list):
        return _messages(parts[0], names[0], where)
    for name, part in zip(names, parts, strict=True):
        if not isinstance(part, str):
            chats = " or an array of messages" if len(parts) == 1 else ""
            raise ValueError(
                f"{where}: the field {name!r} is a JSON {_kind(part)}; a string{chats} is needed."
            )
        if not part.strip():
            raise ValueError(f"{where}: the field {name!r} is empty.")
    return " ".join(parts)


def _messages(found: list[Any], name: str, where: str) -> list[dict[str, str]]:
    if not found:
        raise ValueError(f"{where}: the field {name!r} is empty.")
    for number, message in enumerate(found):
        right = isinstance(message, dict) and {"role", "content"} <= set(message)
        if not right or not all(isinstance(value, str) for value in message.values()):
            raise ValueError(
                f"{where}: message {number} of the field {name!r} must be an object with the "
                "strings 'role' and 'content'."
            )
    if found[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: the last message of the field {name!r} is the assistant's; end with the one "
            "to be answered."
        )
    if not any(message["content"].strip() for message in found):
        raise ValueError(f"{where}: the field {name!r} is empty.")
    return found


def _answer(row: dict[str, Any], name: str, where: str, anything: bool) -> Any:
    answer = _field(row, name, where)
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"{where}: the field {name!r} is too large a number.")
    if anything:
        return answer
    try:
        references(answer)
    except TypeError as error:
        raise ValueError(
            f"{where}: the field {name!r} is or holds a JSON {_kind(answer)}; a string, a number "
            "or an array of these is needed."
        ) from error
    except ValueError as error:
        raise ValueError(f"{where}: the field {name!r} is empty.") from error
    return answer


def _canonical(prompt: str | list[dict[str, str]]) -> str:
    return json.dumps(prompt, sort_keys=True)


def _place(prompt: str) -> float:
    """From 0 up to 1, evenly spread, the same everywhere."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") / 2**64


def _split(
    examples: list[Example], share: float, path: Path
) -> tuple[list[Example], list[Example]]:
    places = {prompt: _place(prompt) for prompt in {_canonical(e.prompt) for e in examples}}
    if len(places) < 2:
        raise ValueError(
            f"{path}: to hold out held_out={share} of the prompts, at least two different ones are "
            "needed; name a second file instead."
        )
    chosen = {prompt for prompt, place in places.items() if place < share}
    # A few prompts may all fall on one side.
    if not chosen:
        chosen = {min(places, key=places.__getitem__)}
    elif len(chosen) == len(places):
        chosen.remove(max(places, key=places.__getitem__))
    train = [example for example in examples if _canonical(example.prompt) not in chosen]
    return train, [example for example in examples if _canonical(example.prompt) in chosen]


def _without(
    examples: list[Example], kept: list[Example], path: Path, second: Path
) -> list[Example]:
    prompts = {_canonical(example.prompt) for example in kept}
    train = [example for example in examples if _canonical(example.prompt) not in prompts]
    if not train:
        raise ValueError(f"{path}: every prompt is held out in {second} too; none is left.")
    if len(train) < len(examples):
        logger.warning(
            "%d of the %d examples of %s are left out of training: %s has their prompts.",
            len(examples) - len(train),
            len(examples),
            path,
            second,
        )
    return train

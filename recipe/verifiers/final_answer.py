"""Where in a completion the answer is, and what a reference answer says."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

GSM8K_MARK = "####"
_MARK = re.compile(rf"(?:{GSM8K_MARK}|\banswer[ \t]*:)[ \t*]*", re.IGNORECASE)


def response(completion: str) -> str:
    """The completion without its thinking.

    That is what follows the last `</think>`; nothing, if a `<think>` was never closed: an answer
    that was cut off while thinking has not been given.
    """
    _, closing, after = completion.rpartition("</think>")
    if closing:
        return after.strip()
    return "" if "<think>" in completion else completion.strip()


def tagged_answer(text: str) -> str | None:
    """What the last `<answer>` encloses (up to the end if it was not closed), else None."""
    _, opening, after = text.rpartition("<answer>")
    return after.partition("</answer>")[0].strip() if opening else None


def final_answer(completion: str) -> str:
    """The one line of a completion that is its answer.

    In this order: what `<answer>` tags enclose; the line after the last `####` or `Answer:`; the
    last line. Empty if there is none.
    """
    text = response(completion)
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged
    marks = list(_MARK.finditer(text))
    if marks:
        return next(iter(_lines(text[marks[-1].end() :])), "")
    lines = _lines(text)
    return lines[-1] if lines else ""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def normalise(text: str) -> str:
    """Lower case, single spaces, no bold marks around it and no full stop behind it."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.strip("*").removesuffix(".").strip("* ")


def references(answer: Any) -> list[str]:
    """The texts that an example's answer accepts.

    Args:
        answer: text, a number, or a list of them (any of them will do). Of a solution that ends in
            `#### N`, only N counts. Whole floats lose their fraction: 3.0 is "3".

    Raises:
        TypeError: the answer is of another type.
        ValueError: it is empty.
    """
    if isinstance(answer, list | tuple):
        found = [text for part in answer for text in references(part)]
        if not found:
            raise ValueError("The example's answer is an empty list; at least one is needed.")
        return found
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise TypeError(
            f"The example's answer is of type {type(answer).__name__}; text, a number or a list of "
            "these is needed."
        )
    if isinstance(answer, float):
        answer = int(answer) if answer.is_integer() else answer
    text = str(answer).rpartition(GSM8K_MARK)[2].strip()
    if not text:
        raise ValueError(f"The example's answer {answer!r} is empty.")
    return [text]

"""The verifier `fuzzy`."""

from __future__ import annotations

from typing import Any

from .final_answer import normalise, references, response, tagged_answer
from .optional import import_optional


def fuzzy(completion: str, answer: Any) -> float:
    """How much two texts agree, by rapidfuzz's `ratio` over 100; the best over several references.

    Case and white space do not matter.

    Args:
        completion: what `<answer>` tags enclose counts, else the whole response.
        answer: text, a number, or a list of them.

    Raises:
        ImportError: rapidfuzz is not installed.
        TypeError, ValueError: see `references`.
    """
    ratio = import_optional("rapidfuzz.fuzz", "rapidfuzz", "verifier='fuzzy'").ratio
    text = response(completion)
    tagged = tagged_answer(text)
    given = normalise(text if tagged is None else tagged)
    return max(float(ratio(given, normalise(wanted))) / 100 for wanted in references(answer))

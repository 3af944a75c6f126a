"""The verifier `exact`."""

from __future__ import annotations

from typing import Any

from .final_answer import final_answer, normalise, references, response


def exact(completion: str, answer: Any) -> float:
    """1 if the completion's answer is the example's, apart from case and white space, else 0.

    Args:
        completion: its answer is found by `final_answer`; where an example's answer has several
            lines, the whole response is compared.
        answer: text, a number, or a list of them of which any will do.

    Raises:
        TypeError, ValueError: see `references`.
    """
    given = normalise(final_answer(completion))
    for reference in references(answer):
        candidates = {given, normalise(response(completion))} if "\n" in reference else {given}
        if normalise(reference) in candidates:
            return 1.0
    return 0.0

"""The verifier `rouge`."""

from __future__ import annotations

import functools
from typing import Any

from .final_answer import references, response, tagged_answer
from .optional import import_optional


@functools.cache
def _parts() -> tuple[Any, Any]:
    tokenizers = import_optional("rouge_score.tokenizers", "rouge-score", "verifier='rouge'")
    distance = import_optional("rapidfuzz.distance", "rapidfuzz", "verifier='rouge'")
    return tokenizers.DefaultTokenizer(use_stemmer=False), distance.LCSseq


def rouge(completion: str, answer: Any) -> float:
    """F measure of ROUGE-L, as rouge-score has it (no stemming); the best over several references.

    The longest common subsequence is found by rapidfuzz: the same number, but rouge-score's table
    in Python takes seconds for a long completion.

    Args:
        completion: what `<answer>` tags enclose counts, else the whole response.
        answer: text, a number, or a list of them.

    Raises:
        ImportError: rouge-score or rapidfuzz is not installed.
        ValueError: a reference has no word that rouge-score knows (it knows a-z and 0-9).
        TypeError: see `references`.
    """
    tokenizer, common_subsequence = _parts()
    text = response(completion)
    tagged = tagged_answer(text)
    given = tokenizer.tokenize(text if tagged is None else tagged)
    best = 0.0
    for reference in references(answer):
        wanted = tokenizer.tokenize(reference)
        if not wanted:
            raise ValueError(
                f"The example's answer {reference!r} has no word of a-z or 0-9, and ROUGE-L knows "
                "no others; use verifier='fuzzy'."
            )
        common = common_subsequence.similarity(wanted, given)
        best = max(best, 2.0 * common / (len(wanted) + len(given)))
    return best

"""What the workers of the verifier `math` do; see worker.py for why this file stands alone."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

math_verify: Any = importlib.import_module("math_verify")

# It warns that its own time limits are off. They work in a main thread only, in whole seconds and
# for each step; the worker has one for all.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

EXTRACTION = (
    math_verify.LatexExtractionConfig(boxed_match_priority=0),
    math_verify.ExprExtractionConfig(),
)
"""Formulas and plain numbers; `\\boxed{...}` goes before "the final answer is"."""


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = math_verify.parse(text, EXTRACTION, parsing_timeout=None)
    return parsed


@functools.lru_cache(maxsize=1024)
def _parse_reference(text: str) -> list[Any]:
    """All completions of a group are compared with the same one."""
    return _parse(text)


def handle(request: tuple[str, tuple[str, ...]]) -> bool:
    """Whether the answer found in a completion equals any of the references.

    Raises:
        ValueError: a reference is no mathematics.
    """
    completion, references = request
    given = None
    for reference in references:
        wanted = _parse_reference(reference)
        if not wanted:
            raise ValueError(f"the answer {reference} cannot be read as mathematics")
        if given is None:
            given = _parse(completion)
        if math_verify.verify(wanted, given, timeout_seconds=None):
            return True
    return False

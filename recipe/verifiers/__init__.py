"""Verifiers: how good a completion is, given the answer of its example, from 0 to 1.

By name: `exact`, `math`, `rouge`, `fuzzy`, or `package.module:function` for a function of yours.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from .counted import CountedReward, RewardError
from .exact import exact
from .function import load_function
from .fuzzy import fuzzy
from .math import MathVerifier
from .rouge import rouge

__all__ = [
    "CountedReward",
    "MathVerifier",
    "RewardError",
    "Verifier",
    "get_verifier",
    "verifier_names",
]

Verifier = Callable[[str, Any], float]
"""`verifier(completion, answer)`."""

_VERIFIERS: dict[str, Verifier] = {
    "exact": exact,
    "fuzzy": fuzzy,
    "math": MathVerifier(),
    "rouge": rouge,
}


def verifier_names() -> list[str]:
    """The names that `get_verifier` knows, besides those of functions."""
    return sorted(_VERIFIERS)


def get_verifier(name: str) -> Verifier:
    """The verifier of this name, or the function at `package.module:function`.

    Raises:
        ValueError: the name is unknown (the message says the nearest), or there is no such
            function.
        TypeError: the name is not text, or what it names cannot be called.
    """
    if not isinstance(name, str):
        raise TypeError(f"verifier must be a name, as in 'math', got {type(name).__name__}.")
    if ":" in name:
        return load_function(name)
    if name not in _VERIFIERS:
        near = difflib.get_close_matches(name.lower(), verifier_names(), n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"verifier={name!r} is unknown: choose {', '.join(verifier_names())}, or "
            f"package.module:function{guess}"
        )
    return _VERIFIERS[name]

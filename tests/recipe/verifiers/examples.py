"""Functions that the tests name as verifiers."""

from __future__ import annotations

from typing import Any

NOT_A_FUNCTION = 3


def length(completion: str, answer: Any) -> float:
    """1 if the completion has as many characters as the answer says."""
    return float(len(completion) == answer)


class Group:
    """A function inside a class."""

    @staticmethod
    def always(completion: str, answer: Any) -> float:
        """1."""
        return 1.0

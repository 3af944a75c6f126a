"""Rewards that fail: counted, logged once a kind, and worth nothing; or the run stops."""

from __future__ import annotations

import logging
import math
import numbers
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..tasks.task import Example

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward function failed and the run is to stop at that."""


class CountedReward:
    """A task's reward that never raises and is always a finite float.

    An exception, a NaN or infinite reward, and one that is no number count as 0. Thread-safe.

    Args:
        reward: `task.reward`.
        stop: raise at the first failure instead.

    Attributes:
        calls: completions judged.
        failures: how many of them failed.
        kinds: failures by kind: the name of an exception, `not finite`, or `type NoneType` and so.
    """

    def __init__(self, reward: Callable[[Example, str], Any], *, stop: bool = False) -> None:
        self._reward = reward
        self._stop = stop
        self._lock = threading.Lock()
        self.calls = 0
        self.kinds: Counter[str] = Counter()

    @property
    def failures(self) -> int:
        """How many completions could not be judged."""
        return sum(self.kinds.values())

    def __call__(self, example: Example, completion: str) -> float:
        """The reward, or 0.0 if it cannot be had.

        Raises:
            RewardError: it failed, and `stop` is set.
        """
        cause: Exception | None = None
        try:
            given = self._reward(example, completion)
        except Exception as error:
            cause = error
            kind, what = type(error).__name__, f"raised {type(error).__name__}: {error}"
        else:
            number = _as_float(given)
            if number is not None and math.isfinite(number):
                with self._lock:
                    self.calls += 1
                return number
            if number is None:
                kind = f"type {type(given).__name__}"
                what = f"returned {given!r:.80}, which is no number"
            else:
                kind, what = "not finite", f"returned {number}"
        with self._lock:
            self.calls += 1
            self.kinds[kind] += 1
            first = self.kinds[kind] == 1
        message = f"The reward of example {example.id!r} {what}"
        if self._stop:
            raise RewardError(f"{message.removesuffix('.')}.") from cause
        if first:
            logger.warning(
                "%s; it counts as 0, and further failures of this kind are only counted.", message
            )
        return 0.0


def _as_float(given: Any) -> float | None:
    """Numbers of Python, NumPy and torch (of one element) as a float; None for anything else."""
    if not isinstance(given, numbers.Real) and hasattr(given, "item"):
        try:
            given = given.item()
        except (RuntimeError, TypeError, ValueError):
            return None
    if not isinstance(given, numbers.Real):
        return None
    try:
        return float(given)
    except OverflowError:
        return math.inf

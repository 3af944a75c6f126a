"""The verifier `math`: math-verify in processes of its own, so that its time is bounded.

math-verify's own limits are alarms, which fail outside the main thread and do not interrupt
arithmetic on huge numbers: `\\boxed{10^{10^{10}}}` would hold up a run for ever.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from pathlib import Path
from typing import Any

from .final_answer import GSM8K_MARK, references, response, tagged_answer
from .worker_pool import RequestFailed, RequestTooLong, WorkerPool

# Not `#### Step 2: ...`, a heading.
_AFTER_MARK = re.compile(rf"{GSM8K_MARK}[ \t]*(?=[-+$€£\\(\[.{{\d])([^\n]+)")
_LATEX_MARKS = ("$", "\\boxed", "\\(", "\\[")


class MathVerifier:
    """1 if a completion's answer is mathematically the example's, else 0.

    A completion's answer is what `<answer>` tags enclose; else the last `\\boxed{...}`; else what
    follows the last `####`; else what math-verify finds: "the final answer is", the last formula or
    the last number. A completion that cannot be checked within the limit gets 0. Safe in threads,
    which run `workers` checks at a time, and in forked processes.

    Args:
        limit: most seconds for one completion.
        workers: most processes; default: half the processors, from 1 to 4.

    Attributes:
        timeouts: completions that were not checked within the limit.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, limit: float = 3.0, workers: int | None = None) -> None:
        self._arguments = limit, workers
        handler = Path(__file__).with_name("math_worker.py")
        self._pool = WorkerPool(handler, limit=limit, workers=workers)
        self._lock = threading.Lock()
        self.timeouts = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __call__(self, completion: str, answer: Any) -> float:
        """1.0 or 0.0.

        Args:
            completion: the whole of it.
            answer: LaTeX with or without `$` or `\\boxed`, a number, a solution that ends in
                `#### N`, or a list of these of which any will do.

        Raises:
            ImportError: math-verify is not installed.
            ValueError: the answer is empty or no mathematics.
            TypeError: the answer is of another type.
            RuntimeError: no process can be started.
        """
        wanted = tuple(_as_formula(text) for text in references(answer))
        given = _where_the_answer_is(completion)
        if not given:
            return 0.0
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("verifier='math' needs math-verify: run `pip install math-verify`.")
        try:
            return float(self._pool.ask((given, wanted)))
        except RequestTooLong:
            with self._lock:
                self.timeouts += 1
            return 0.0
        except RequestFailed as error:
            raise ValueError(f"verifier='math' failed: {error}.") from error

    def close(self) -> None:
        """End the idle processes; the next completion starts others."""
        self._pool.close()


def _as_formula(reference: str) -> str:
    """math-verify reads LaTeX only where it is marked as such."""
    marked = "\\boxed" in reference or "$" in reference.replace("\\$", "")
    return reference if marked else f"${reference}$"


def _where_the_answer_is(completion: str) -> str:
    text = response(completion)
    found = tagged_answer(text)
    if found is None:
        after_marks = [] if "\\boxed" in text else _AFTER_MARK.findall(text)
        if not after_marks:
            return text
        found = str(after_marks[-1])
    is_bare_latex = "\\" in found and not any(mark in found for mark in _LATEX_MARKS)
    return f"${found}$" if is_bare_latex else found

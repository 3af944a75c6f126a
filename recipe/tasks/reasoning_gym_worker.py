"""What the workers of a reasoning-gym task do.

See ../verifiers/worker.py for why this file stands alone.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

reasoning_gym: Any = importlib.import_module("reasoning_gym")


@functools.lru_cache(maxsize=8)
def _dataset(name: str, size: int, seed: int) -> Any:
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


def handle(request: tuple[str, int, int, str, dict[str, Any]]) -> float:
    """The dataset's own score of an answer."""
    name, size, seed, answer, entry = request
    return float(_dataset(name, size, seed).score_answer(answer, entry))

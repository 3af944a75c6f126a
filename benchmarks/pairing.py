"""Timing two things against each other on a machine whose speed drifts.

Both run in one process, in turns of a few steps, so that whatever else the machine does slows
both. Each pair of turns, or each period of turns, gives one ratio; the median ratio is reported
with its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tqdm import tqdm


class Stepper(Protocol):
    """Something that takes one step at a time. Only `step` is timed."""

    def step(self) -> None:
        """The timed part of a step."""

    def after(self) -> None:
        """What must follow a step but is not counted, such as setting the state back."""


@dataclass(frozen=True)
class PairedTimes:
    """Seconds of every step of both sides, period by period."""

    subject: list[list[float]]
    rival: list[list[float]]

    def ratios(self) -> list[float]:
        """Mean step of the subject over mean step of the rival, one figure a period."""
        return [
            statistics.fmean(ours) / statistics.fmean(theirs)
            for ours, theirs in zip(self.subject, self.rival, strict=True)
        ]


def time_in_turns(
    subject: Stepper,
    rival: Stepper,
    *,
    periods: int,
    steps: int,
    turn: int,
    rival_turn: int | None = None,
    label: str = "",
) -> PairedTimes:
    """Let both sides take `turn` steps in turns until the subject has taken `periods * steps`.

    Args:
        periods: how many ratios to take.
        steps: subject's steps in a period, a multiple of `turn`. Where a side has a cycle (one
            eviction every so many steps), `steps` is that cycle, so that every ratio holds
            whole cycles.
        turn: steps before the other side's turn. Who begins alternates.
        rival_turn: the rival's steps in a turn, when its steps are much slower; `turn` if None.
        label: what the progress bar says.

    Raises:
        ValueError: `steps` is not a multiple of `turn`.
    """
    if turn < 1 or steps % turn:
        raise ValueError(f"steps={steps} must be a multiple of turn={turn}.")
    rival_turn = rival_turn or turn
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    turns = steps // turn
    with tqdm(total=periods * turns, desc=label, leave=False) as progress:
        for _ in range(periods):
            ours.append([])
            theirs.append([])
            for number in range(turns):
                sides: list[tuple[Callable[[], list[float]], list[float]]] = [
                    (lambda: _take(subject, turn), ours[-1]),
                    (lambda: _take(rival, rival_turn), theirs[-1]),
                ]
                for run, times in sides if number % 2 == 0 else reversed(sides):
                    times += run()
                progress.update()
    return PairedTimes(ours, theirs)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles, least and greatest of `values`, and how many there are."""
    ordered = sorted(values)
    if len(ordered) > 1:
        low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive")
    else:
        low = middle = high = ordered[0]
    return {
        "median": middle,
        "quartiles": [low, high],
        "range": [ordered[0], ordered[-1]],
        "count": len(ordered),
    }


def _take(side: Stepper, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        side.step()
        times.append(time.perf_counter() - start)
        side.after()
    return times

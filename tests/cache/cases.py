"""Random configurations of a cache and of the calls that fill it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from sparse_cache import SparseBudgetCache

from .driving import POLICIES


@dataclass
class Case:
    """One configuration of everything that a replay may depend on."""

    kv_heads: int
    group: int
    head_size: int
    layers: int
    attention: str
    policy: str
    budget: int | float
    interval: int
    window: int
    sinks: int
    chunks: list[int]
    padding: list[list[list[bool]]] = field(repr=False)
    """By row and chunk, which columns are padding."""

    @property
    def real(self) -> torch.Tensor:
        return torch.tensor(
            [[not p for chunk in row for p in chunk] for row in self.padding]
        ).long()

    def cache(self) -> SparseBudgetCache:
        return SparseBudgetCache(
            self.budget,
            policy=self.policy,
            interval=self.interval,
            window=self.window,
            sinks=self.sinks,
            record=True,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    window, sinks = draw(st.integers(1, 5)), draw(st.integers(0, 3))
    if draw(st.integers(0, 4)):
        budget: int | float = window + sinks + draw(st.integers(0, 20))
    else:
        budget = draw(st.sampled_from([0.1, 0.35, 0.8]))
    sizes = st.one_of(st.just(1), st.just(1), st.integers(2, 24))
    chunks = draw(st.lists(sizes, min_size=3, max_size=22))
    padding = []
    for _ in range(draw(st.integers(1, 3))):
        row, lead = [], draw(st.integers(0, 12))
        for length in chunks:
            here = min(lead, length)
            lead -= here
            columns = [True] * here + [False] * (length - here)
            if here == 0 and length > 3 and draw(st.integers(0, 5)) == 0:
                # Padding in the middle, as in the second turn of a batch; the last column is real.
                start = draw(st.integers(0, length - 2))
                stop = draw(st.integers(start, length - 1))
                columns[start:stop] = [True] * (stop - start)
            row.append(columns)
        row[-1][-1] = False
        padding.append(row)
    return Case(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([2, 6, 8, 14])),
        layers=draw(st.integers(1, 2)),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        policy=draw(st.sampled_from(POLICIES)),
        budget=budget,
        interval=draw(st.integers(1, 9)),
        window=window,
        sinks=sinks,
        chunks=chunks,
        padding=padding,
    )

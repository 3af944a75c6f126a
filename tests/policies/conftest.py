"""Views of made-up layers, for every policy test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from sparse_cache.policies import PolicyView

ViewFactory = Callable[..., PolicyView]


def build_view(
    *,
    rows: int = 2,
    heads: int = 2,
    group: int = 2,
    stored: int = 24,
    size: int = 8,
    value_size: int | None = None,
    window: int = 4,
    sinks: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    scale: float = 1.0,
    scaling: float | None = None,
    layer_idx: int = 3,
    seen: int | None = None,
) -> PolicyView:
    """A layer of random tokens, some of which were evicted, with all optional fields filled.

    `seen` real tokens went through each row (row `b` saw `b` more); sinks and window are stored,
    the others are drawn.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    base = stored + 7 if seen is None else seen
    counts = base + torch.arange(rows)
    positions = torch.empty(rows, heads, stored, dtype=torch.int64)
    for row, count in enumerate(counts.tolist()):
        for head in range(heads):
            order = torch.rand(count, generator=generator)
            order[: min(sinks, stored - window)] = 2
            order[count - window :] = 2
            positions[row, head] = order.topk(stored).indices.sort().values
    return PolicyView(
        keys=normal(rows, heads, stored, size),
        values=normal(rows, heads, stored, size if value_size is None else value_size),
        positions=positions,
        seen=counts,
        queries=normal(rows, heads * group, window, size),
        attention_mass=torch.rand(rows, heads, stored, generator=generator) * 3,
        scaling=size**-0.5 if scaling is None else scaling,
        window=window,
        sinks=sinks,
        budget=max(window + sinks, stored // 2),
        layer_idx=layer_idx,
    )


def take_row(view: PolicyView, row: int) -> PolicyView:
    """The same view with one of its rows alone."""
    alone = {
        field.name: getattr(view, field.name)[row : row + 1].clone()
        for field in dataclasses.fields(view)
        if isinstance(getattr(view, field.name), torch.Tensor)
    }
    return dataclasses.replace(view, **alone)


@pytest.fixture(scope="session")
def make_view() -> ViewFactory:
    """Factory of views; see `build_view` for its arguments."""
    return build_view


@pytest.fixture(scope="session")
def one_row() -> Callable[[PolicyView, int], PolicyView]:
    """Take one row of a view."""
    return take_row

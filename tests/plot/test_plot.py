"""The picture shows what the trace says, checked on the pixels' data."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_cache import NEVER, EvictionTrace, SparseBudgetCache
from sparse_cache.plot import plot_kept_tokens
from tests.tiny_model import feed

# Layers 1 and 4 have a budget; one row, two heads, four tokens. In layer 1, head 0 loses token 1
# after three tokens, head 1 loses token 2 after four.
TRACE = EvictionTrace(
    deaths=[
        torch.tensor([[[NEVER, 3, NEVER, NEVER], [NEVER, NEVER, 4, NEVER]]], dtype=torch.int32),
        torch.tensor([[[0, NEVER, 3, NEVER], [0, 3, NEVER, NEVER]]], dtype=torch.int32),
    ],
    layer_indices=[1, 4],
    tokens_seen=4,
)


def _image(figure: Any, axes: int, image: int = 0) -> list[list[float | None]]:
    data = figure.axes[axes].images[image].get_array().filled(math.nan).tolist()
    return [[None if math.isnan(value) else value for value in line] for line in data]


def test_every_layer_and_head_is_a_line() -> None:
    figure = plot_kept_tokens(TRACE)
    lived, held = _image(figure, 1, 0), _image(figure, 1, 1)
    assert held == [
        [1, None, 1, 1],
        [1, 1, None, 1],
        [None, 1, None, 1],  # token 0 is padding
        [None, None, 1, 1],
    ]
    assert lived == [
        [None, 2, None, None],
        [None, None, 2, None],
        [None, None, 1, None],
        [None, 2, None, None],
    ]


def test_a_layer_over_time_is_the_share_of_heads_that_see_a_token() -> None:
    figure = plot_kept_tokens(TRACE, layers=[1])
    over_time = next(
        index for index, axes in enumerate(figure.axes) if "over time" in axes.get_title(loc="left")
    )
    assert _image(figure, over_time) == [
        [1, None, None, None],
        [1, 1, None, None],
        [1, 1, 1, None],
        [1, 0.5, 1, 1],  # head 0 lost token 1; head 1 loses token 2 only after this moment
    ]


def test_a_cache_is_drawn_and_saved(tmp_path: Path) -> None:
    cache = SparseBudgetCache(budget=6, interval=2, window=2, sinks=1, record=True, policy="window")
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        keys = torch.randn(1, 2, 1, 4, generator=generator)
        feed(cache, keys)
    figure = plot_kept_tokens(cache, tmp_path / "kept.png", prompt_length=3, title="Kept")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")
    assert figure.get_suptitle() == "Kept"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row": 1}, r"row=1 is not in this batch of 1"),
        ({"row": -1}, r"row=-1"),
        ({"layers": [0]}, r"layers=\[0\] must name budgeted layers; they are 1, 4"),
        ({"layers": []}, r"layers=\[\]"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_kept_tokens(TRACE, **options)


def test_a_cache_without_a_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="record=True"):
        plot_kept_tokens(SparseBudgetCache(budget=64))


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_kept_tokens(TRACE)

"""A picture of an eviction trace: which tokens each layer and head holds, and until when."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .cache import SparseBudgetCache
from .trace import NEVER, EvictionTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELD = "#d9480f"
"""Colour of tokens that are still held."""
MOST_TIMES = 400
"""Most moments drawn in a picture over time; a screen shows no more."""


def plot_kept_tokens(
    source: SparseBudgetCache | EvictionTrace,
    path: str | os.PathLike[str] | None = None,
    *,
    row: int = 0,
    layers: Sequence[int] | None = None,
    prompt_length: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw which tokens of one sequence are held by each layer and head, over time.

    The large picture has a line for each layer and KV head and a column for each token: orange
    where the token is still held, blue where it was evicted, the darker the longer it had lived.
    The bars above it count the heads that still hold a token. The small pictures show single layers
    over time: a horizontal cut is what the layer holds at that moment.

    Args:
        source: a cache made with `record=True`, or its trace.
        path: where to save the picture (the ending decides the format); nowhere when None.
        row: which row of the batch.
        layers: indices in the model of the layers drawn over time; the first, the middle and the
            last budgeted layer when None.
        prompt_length: marks where the prompt ends, when given.
        title: above everything; a short description when None.

    Returns:
        The figure, to be changed or saved by the caller.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no trace, no such row, or no such budgeted layer.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_kept_tokens needs matplotlib; install it with: pip install matplotlib"
        ) from error
    trace = source if isinstance(source, EvictionTrace) else source.trace()
    if not trace.deaths:
        raise ValueError("the trace has no budgeted layers, so there is nothing to draw.")
    batch = trace.deaths[0].shape[0]
    if not 0 <= row < batch:
        raise ValueError(f"row={row} is not in this batch of {batch}; pass 0 to {batch - 1}.")
    chosen = _chosen_layers(trace, layers)
    deaths = [layer[row].cpu().long() for layer in trace.deaths]

    figure = Figure(figsize=(13, 7), layout="constrained")
    grid = figure.add_gridspec(
        2 * len(chosen), 2, width_ratios=[3, 1.15], height_ratios=[1, 1] * len(chosen)
    )
    left = grid[:, 0].subgridspec(2, 1, height_ratios=[1, 6], hspace=0.02)
    profile = figure.add_subplot(left[0])
    heads = figure.add_subplot(left[1], sharex=profile)
    _draw_heads(figure, heads, trace, deaths)
    _draw_profile(profile, trace, deaths)
    for index, layer in enumerate(chosen):
        axes = figure.add_subplot(grid[2 * index : 2 * index + 2, 1])
        _draw_over_time(axes, trace, deaths[trace.layer_indices.index(layer)])
        axes.set_title(f"layer {layer} over time", fontsize=10, loc="left")
        if index == len(chosen) - 1:
            axes.set_xlabel("token")
    if prompt_length is not None:
        for axes in (profile, heads):
            axes.axvline(prompt_length - 0.5, color="black", linewidth=0.8, linestyle="--")
        profile.annotate(
            "prompt ends",
            (prompt_length, 0.92),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            va="top",
        )
    figure.suptitle(title or _describe(source, trace, deaths), fontsize=13, x=0.01, ha="left")
    if path is not None:
        figure.savefig(path, dpi=160)
    return figure


def _chosen_layers(trace: EvictionTrace, layers: Sequence[int] | None) -> list[int]:
    known = trace.layer_indices
    if layers is None:
        return sorted({known[0], known[len(known) // 2], known[-1]})
    unknown = [layer for layer in layers if layer not in known]
    if unknown or not layers:
        names = ", ".join(map(str, known))
        raise ValueError(f"layers={list(layers)} must name budgeted layers; they are {names}.")
    return list(layers)


def _draw_heads(
    figure: Figure, axes: Axes, trace: EvictionTrace, deaths: list[torch.Tensor]
) -> None:
    """Every layer and head as a line, every token as a column."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    lines = torch.cat(deaths)
    born = torch.arange(lines.shape[1])
    held = lines == NEVER
    lived = (lines - born).clamp(min=0).double()
    lived[held | (lines == 0)] = float("nan")
    blues = LinearSegmentedColormap.from_list(
        "lived", matplotlib.colormaps["Blues"]([0.12, 0.35, 0.65, 1.0])
    )
    extent = (-0.5, lines.shape[1] - 0.5, len(lines), 0)
    image = axes.imshow(
        lived.numpy(), aspect="auto", interpolation="nearest", cmap=blues, vmin=0, extent=extent
    )
    still = torch.where(held, 1.0, float("nan"))
    axes.imshow(
        still.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([HELD]),
        extent=extent,
    )
    starts = [0]
    for layer in deaths:
        starts.append(starts[-1] + len(layer))
    centres = [(first + end) / 2 for first, end in itertools.pairwise(starts)]
    step = max(1, len(centres) // 10)
    axes.set_yticks(centres[::step], [str(index) for index in trace.layer_indices[::step]])
    if len(deaths) <= 40:
        for start in starts[1:-1]:
            axes.axhline(start, color="white", linewidth=0.6)
    axes.set_ylabel("layer (a line for each KV head)")
    axes.set_xlabel("token")
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, aspect=40, pad=0.02)
    bar.set_label("orange: still held     blue: evicted after so many tokens", fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _draw_profile(axes: Axes, trace: EvictionTrace, deaths: list[torch.Tensor]) -> None:
    """Share of all heads that still hold each token."""
    share = (torch.cat(deaths) == NEVER).double().mean(0).numpy()
    axes.fill_between(range(len(share)), share, step="mid", color=HELD, linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 1], ["0 %", "100 %"], fontsize=8)
    axes.set_ylabel("heads\nholding it", fontsize=8)
    axes.tick_params(labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_over_time(axes: Axes, trace: EvictionTrace, deaths: torch.Tensor) -> None:
    """Share of a layer's heads that hold each token, at each moment; `deaths` is `[H, T]`."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap

    tokens = deaths.shape[1]
    times = torch.linspace(1, tokens, min(tokens, MOST_TIMES)).round().long()
    # A query at column i sees token j when j <= i < death[j].
    query = times[:, None, None] - 1
    born = torch.arange(tokens)
    held = ((born <= query) & (query < deaths)).double().mean(1)
    held[(born > query[:, 0])] = float("nan")
    oranges = LinearSegmentedColormap.from_list(
        "held", ["#eef1f4", *matplotlib.colormaps["Oranges"]([0.35, 0.6]), HELD]
    )
    axes.imshow(
        held.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap=oranges,
        vmin=0,
        vmax=1,
        extent=(-0.5, tokens - 0.5, tokens, 0),
    )
    axes.set_ylabel("tokens seen", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _describe(
    source: SparseBudgetCache | EvictionTrace, trace: EvictionTrace, deaths: list[torch.Tensor]
) -> str:
    held = max(int((layer == NEVER).sum(-1).max()) for layer in deaths)
    text = f"{held} of {trace.tokens_seen} tokens held per layer and head"
    if isinstance(source, SparseBudgetCache):
        text += f"  ·  policy {source.settings.policy.name}, budget {source.settings.budget}"
    return text

"""Confidence intervals for means over texts."""

from __future__ import annotations

import torch


def interval(
    totals: torch.Tensor,
    counts: torch.Tensor,
    *,
    level: float = 0.95,
    draws: int = 4000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap interval of a mean per token, resampling texts and then segments within texts.

    Tokens of a text resemble each other, so resampling tokens would give intervals that are much
    too narrow. With few texts even this is a rough figure.

    Args:
        totals: `[texts, segments]`, sums over the tokens of each segment.
        counts: `[texts, segments]`, tokens in each segment.
        level: coverage.
        draws: resamples.
        seed: of the resampling; equal seeds draw equal samples, so that intervals of differences
            are intervals of paired differences.

    Returns:
        The lower and the upper end.
    """
    generator = torch.Generator().manual_seed(seed)
    texts, segments = totals.shape
    text = torch.randint(texts, (draws, texts, 1), generator=generator)
    segment = torch.randint(segments, (draws, texts, segments), generator=generator)
    sums = totals.double()[text, segment].sum((1, 2))
    means = sums / counts.double()[text, segment].sum((1, 2))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = means.quantile(tails).tolist()
    return low, high

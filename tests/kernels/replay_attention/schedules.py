"""Random deaths, as evictions of a budget bring them about and as nothing would."""

from __future__ import annotations

import torch

NEVER = torch.iinfo(torch.int32).max


def evicting_deaths(
    heads: int,
    length: int,
    *,
    budget: int,
    interval: int,
    prompt: int,
    generator: torch.Generator,
    padding: int = 0,
    ragged: bool = False,
) -> torch.Tensor:
    """Deaths `[H, T]` of a row that keeps a random `budget` of its tokens each `interval` columns.

    Args:
        heads, length: the shape.
        budget: tokens that stay; with `ragged` between half of it and all of it, by head.
        interval: columns between evictions.
        prompt: column of the first eviction, padding not counted.
        generator: what is random.
        padding: columns before the first token.
        ragged: whether heads keep different numbers.
    """
    deaths = torch.full((heads, length), NEVER, dtype=torch.int32)
    deaths[:, :padding] = 0
    column = torch.arange(length)
    for at in range(padding + max(prompt, 1), length + 1, interval):
        for head in range(heads):
            alive = ((column < at) & (deaths[head] > at)).nonzero()[:, 0]
            keep = budget
            if ragged:
                keep = int(torch.randint(budget // 2, budget + 1, (1,), generator=generator))
            if len(alive) > keep:
                # The newest stays, as a window of one.
                order = torch.randperm(len(alive) - 1, generator=generator)
                deaths[head, alive[order[: len(alive) - keep]]] = at
    return deaths


def batch_of(rows: list[torch.Tensor]) -> torch.Tensor:
    """`[B, H, T]`."""
    return torch.stack(rows)


def causal_deaths(batch: int, heads: int, length: int) -> torch.Tensor:
    """Nothing ever dies."""
    return torch.full((batch, heads, length), NEVER, dtype=torch.int32)

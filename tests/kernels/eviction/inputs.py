"""Layers as a cache holds them, with poison wherever nothing may look."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ("reference", "triton")
POISON = 1 << 30


@dataclass
class Layers:
    """All that an eviction of a few layers reads and writes."""

    scores: torch.Tensor
    positions: list[torch.Tensor]
    order: list[torch.Tensor]
    lengths: torch.Tensor
    keys: list[torch.Tensor]

    def clone(self) -> Layers:
        return Layers(
            self.scores.clone(),
            [each.clone() for each in self.positions],
            [each.clone() for each in self.order],
            self.lengths.clone(),
            [each.clone() for each in self.keys],
        )


def make_layers(
    lengths: torch.Tensor,
    stored: int,
    *,
    spare: int = 3,
    size: int = 4,
    dtype: torch.dtype = torch.float32,
    values: int = 5,
    seed: int = 0,
    shuffled: bool = True,
) -> Layers:
    """Layers that hold `lengths` `[L, B, H]` tokens, in slots of random order.

    Args:
        lengths: tokens of each head.
        stored: S of the scores.
        spare: slots of the layers beyond it; each layer has one more than the one before.
        size: of a row.
        dtype: of the rows.
        values: how many different scores there are; few make ties.
        seed: of all random numbers.
        shuffled: whether slots differ from the order of the sequence.
    """
    random = torch.Generator().manual_seed(seed)
    layers, rows, heads = lengths.shape
    scores = torch.randint(0, values, (layers, rows, heads, stored), generator=random).float() - 1
    positions, order, keys = [], [], []
    for layer in range(layers):
        capacity = stored + spare + layer
        places = torch.full((rows, heads, capacity), -POISON, dtype=torch.int32)
        slots = torch.full((rows, heads, capacity), POISON, dtype=torch.int32)
        if dtype.is_floating_point:
            tokens = torch.full((rows, heads, capacity, size), float("nan"), dtype=dtype)
        else:
            tokens = torch.full((rows, heads, capacity, size), 111, dtype=dtype)
        for row in range(rows):
            for head in range(heads):
                length = int(lengths[layer, row, head])
                scores[layer, row, head, length:] = float("nan")
                gaps = torch.randint(1, 3, (length,), generator=random)
                places[row, head, :length] = gaps.cumsum(0) - 1
                slots[row, head, :length] = (
                    torch.randperm(length, generator=random)
                    if shuffled
                    else torch.arange(length, dtype=torch.int32)
                )
                tokens[row, head, :length] = torch.randint(
                    -100, 100, (length, size), generator=random
                ).to(dtype)
        positions.append(places.to(DEVICE))
        order.append(slots.to(DEVICE))
        keys.append(tokens.to(DEVICE))
    return Layers(scores.to(DEVICE), positions, order, lengths.int().to(DEVICE), keys)


def per_head(values: list[list[list[int]]] | int, shape: tuple[int, int, int]) -> torch.Tensor:
    """An int32 tensor `[L, B, H]`, expanded from one number if it is one."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE).expand(shape)


def random_lengths(shape: tuple[int, int, int], most: int, seed: int = 0) -> torch.Tensor:
    """Lengths from 1 to `most`, both of them there."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, most + 1, shape, generator=random)
    lengths.view(-1)[0], lengths.view(-1)[-1] = 1, most
    return lengths

"""Times that the hardware allows at best, computed from bytes and operations. Nothing is measured.

A kernel takes at least its bytes over the memory's bandwidth and its operations over the peak rate;
the larger of the two is its roofline time. Launches and everything between kernels come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparse_cache.kernels.eviction import plan_compaction, plan_hole_filling
from sparse_cache.kernels.eviction.traffic import (
    compaction_traffic,
    gather_and_copy_traffic,
    hole_filling_traffic,
)


@dataclass(frozen=True)
class Card:
    """Published figures of a GPU."""

    name: str
    bandwidth: float
    """Bytes a second."""
    peak: float
    """Operations a second of bf16 matrix products, without sparsity."""


CARDS = (
    # NVIDIA A100 datasheet, A100 80GB SXM: 2,039 GB/s, 312 TFLOPS.
    # https://www.nvidia.com/en-us/data-center/a100/
    Card("A100 80GB", 2.039e12, 312e12),
    # NVIDIA H100 datasheet, H100 SXM: 3.35 TB/s; 1,979 TFLOPS with sparsity, so half without.
    # https://www.nvidia.com/en-us/data-center/h100/
    Card("H100", 3.35e12, 989.5e12),
    # NVIDIA HGX B200: 8 TB/s a GPU; 4.5 PFLOPS with sparsity, so half without.
    # https://www.nvidia.com/en-us/data-center/hgx/
    Card("B200", 8.0e12, 2.25e15),
)


@dataclass(frozen=True)
class Shape:
    """A cache and the model around it, in bf16."""

    layers: int = 32
    batch: int = 16
    heads: int = 8
    group: int = 4
    head_size: int = 128
    budget: int = 512
    interval: int = 128
    window: int = 8
    element_bytes: int = 2


@dataclass(frozen=True)
class Work:
    """What a kernel has to do at least."""

    bytes: int
    operations: int = 0

    def seconds(self, card: Card) -> float:
        """Roofline time on a card."""
        return max(self.bytes / card.bandwidth, self.operations / card.peak)


def decode_work(shape: Shape, tokens: int) -> Work:
    """One token's attention in all layers over `tokens` stored ones, with each key's mass."""
    heads = shape.layers * shape.batch * shape.heads
    row = 2 * shape.head_size * shape.element_bytes
    # Keys and values once; query and output; the mass, float32, is read and written.
    return Work(
        bytes=heads * (tokens * (row + 8) + shape.group * row),
        operations=heads * shape.group * tokens * 4 * shape.head_size,
    )


def scoring_work(shape: Shape) -> Work:
    """R-KV's scores of all layers: window importance, and redundancy with every similarity.

    The operations of the similarities are an upper bound: the search for a row's last similar key
    ends early where there is one. Each kernel reads the keys once and writes float32 scores.
    """
    heads = shape.layers * shape.batch * shape.heads
    tokens = shape.budget + shape.interval
    keys = tokens * shape.head_size * shape.element_bytes
    similarities = 2 * tokens * tokens * shape.head_size
    logits = 2 * shape.group * shape.window * tokens * shape.head_size
    return Work(heads * (2 * keys + 2 * tokens * 4), heads * (similarities + logits))


def eviction_work(shape: Shape, seed: int = 0) -> dict[str, dict[str, int]]:
    """Bytes of one eviction of all layers, counted from plans over random scores, for three ways.

    Returns:
        For each way `moved` (read and written) and `transient` bytes.
    """
    stored = shape.budget + shape.interval
    generator = torch.Generator().manual_seed(seed)
    # A few layers and rows stand for all: heads are alike, so that bytes grow with their number.
    layers, rows = min(2, shape.layers), min(4, shape.batch)
    sizes = (layers, rows, shape.heads)
    scores = torch.rand(*sizes, stored, generator=generator)
    lengths = torch.full(sizes, stored, dtype=torch.int32)
    keep = torch.full(sizes, shape.budget, dtype=torch.int32)
    places = torch.arange(stored, dtype=torch.int32).expand(*sizes, stored)
    row = [shape.head_size * shape.element_bytes] * 2
    options: dict[str, Any] = {"window": shape.window, "sinks": 4, "implementation": "reference"}
    plan = plan_hole_filling(
        scores,
        [layer.clone() for layer in places],
        [layer.clone() for layer in places],
        lengths,
        keep,
        most_evicted=shape.interval,
        **options,
    )
    kept = plan_compaction(scores, list(places), lengths, keep, most_kept=shape.budget, **options)
    counted = {
        "hole filling": hole_filling_traffic(plan, lengths, keep, stored=stored, row_bytes=row),
        "compaction": compaction_traffic(kept, lengths, keep, stored=stored, row_bytes=row),
        "gather and copy": gather_and_copy_traffic(lengths, keep, stored=stored, row_bytes=row),
    }
    more_layers, more_rows = shape.layers / layers, shape.batch / rows
    return {
        way: {
            "moved": round(traffic.moved * more_layers * more_rows),
            # A gather holds one layer at a time.
            "transient": round(
                traffic.transient * more_rows * (1 if way == "gather and copy" else more_layers)
            ),
        }
        for way, traffic in counted.items()
    }


def roofline_table(shapes: list[Shape]) -> list[dict[str, Any]]:
    """One row a shape and card: bytes and best times of a decode step, a scoring, an eviction."""
    rows = []
    for shape in shapes:
        decode = decode_work(shape, shape.budget + shape.interval // 2)
        scoring = scoring_work(shape)
        evictions = eviction_work(shape)
        for card in CARDS:
            step = decode.seconds(card)
            ways = {
                way: {**figures, "seconds": figures["moved"] / card.bandwidth}
                for way, figures in evictions.items()
            }
            event = scoring.seconds(card) + ways["hole filling"]["seconds"]
            rows.append(
                {
                    "computed_not_measured": True,
                    "card": card.name,
                    **vars(shape),
                    "decode_bytes": decode.bytes,
                    "decode_seconds": step,
                    "scoring_bytes": scoring.bytes,
                    "scoring_operations": scoring.operations,
                    "scoring_seconds": scoring.seconds(card),
                    "evictions": ways,
                    # Against the attention alone, without the weights that a step reads as well.
                    "share_of_interval": event / (shape.interval * step),
                }
            )
    return rows

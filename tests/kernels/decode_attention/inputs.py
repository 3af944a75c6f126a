"""Inputs, and the truth in float64 written on its own, for the tests of decode attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter computes dots of bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@dataclass
class Inputs:
    """Arguments of one call; garbage in the slots that hold nothing."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    mass: torch.Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """By name, with a mass of its own."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.mass is not None:
            found["mass"] = self.mass.clone()
        return found


def make(
    *,
    batch: int = 2,
    heads: int = 2,
    group: int = 4,
    capacity: int = 130,
    size: int = 64,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    lengths: list[list[int]] | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    int8: bool = False,
    pooled: bool = False,
    mass: bool = True,
    spread: float = 1.0,
    seed: int = 0,
) -> Inputs:
    """Random inputs; by default one head is full and one holds a single token.

    With int8, integers beyond the lengths are poison through their scales, which are NaN there.
    """
    generator = torch.Generator().manual_seed(seed)
    value_size = size if value_size is None else value_size
    if lengths is None:
        drawn = torch.randint(0, capacity + 1, (batch, heads), generator=generator)
        drawn[0, 0], drawn[-1, -1] = capacity, 1
        lengths = drawn.tolist()
    counts = torch.tensor(lengths, dtype=torch.int32)
    offsets = None
    stored = (batch, heads, capacity)
    if pooled:
        # Heads lie behind each other in an order that differs from theirs, with holes between.
        offsets = torch.zeros(batch, heads, dtype=torch.int64)
        for row in range(batch):
            start = 3
            for head in reversed(range(heads)):
                offsets[row, head] = start
                start += int(counts[row, head]) + 2
        stored = (batch, 1, int((offsets + counts).max()) + 5)
    held = torch.zeros(stored, dtype=torch.bool)
    for row, head, slots in owned(counts, offsets):
        held[row, head, slots] = True

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        mask = held if tensor.dim() == 3 else held[..., None]
        return torch.where(mask, tensor, float("nan"))

    key_scales = value_scales = None
    if int8:
        keys, values = (
            torch.randint(-127, 128, (*stored, width), generator=generator).to(torch.int8)
            for width in (size, value_size)
        )
        key_scales, value_scales = (
            poisoned(torch.rand(stored, generator=generator) * 0.02) for _ in range(2)
        )
    else:
        keys = poisoned(normal(*stored, size) * spread).to(dtype)
        values = poisoned(normal(*stored, value_size)).to(dtype)
    # As models give it: a transposed view.
    query = (normal(batch, 1, heads * group, size) * spread).to(dtype)
    made = Inputs(
        query=query.to(DEVICE).transpose(1, 2),
        keys=keys,
        values=values,
        lengths=counts,
        scaling=size**-0.5,
        softcap=softcap,
        sinks=normal(heads * group).to(dtype) if sinks else None,
        key_scales=key_scales,
        value_scales=value_scales,
        offsets=offsets,
        mass=poisoned(torch.rand(stored, generator=generator)) if mass else None,
    )
    for field in fields(made):
        value = getattr(made, field.name)
        if isinstance(value, torch.Tensor):
            setattr(made, field.name, value.to(DEVICE))
    return made


def owned(lengths: torch.Tensor, offsets: torch.Tensor | None) -> list[tuple[int, int, slice]]:
    """Row, head of the storage and slots of every KV head, in the order of rows and KV heads."""
    found = []
    for row, counts in enumerate(lengths.tolist()):
        for head, count in enumerate(counts):
            start = 0 if offsets is None else int(offsets[row, head])
            found.append((row, head if offsets is None else 0, slice(start, start + count)))
    return found


@dataclass
class Truth:
    """float64 results, and what the error bounds are made of."""

    output: torch.Tensor
    log_sum_exp: torch.Tensor
    mass: torch.Tensor
    """`[B, H, C]`: what is added, 0 where nothing is held."""
    largest_value: torch.Tensor
    """`[B, Hq, 1, 1]`: largest magnitude of the head's values."""
    largest_logit: float
    """Largest magnitude of what is summed up to a logit: `scaling * sum |q| |k|`."""


def truth(made: Inputs) -> Truth:
    """One query head at a time, in float64."""
    batch, query_heads = made.query.shape[:2]
    group = query_heads // made.lengths.shape[1]
    output = torch.zeros(batch, query_heads, 1, made.values.shape[3], dtype=torch.float64)
    log_sum_exp = torch.full((batch, query_heads), float("-inf"), dtype=torch.float64)
    mass = torch.zeros(made.keys.shape[:3], dtype=torch.float64)
    largest_value = torch.zeros(batch, query_heads, 1, 1, dtype=torch.float64)
    largest_logit = 0.0
    heads = made.lengths.shape[1]
    for number, (row, stored, slots) in enumerate(owned(made.lengths, made.offsets)):
        keys = made.keys[row, stored, slots].double().cpu()
        values = made.values[row, stored, slots].double().cpu()
        if made.key_scales is not None and made.value_scales is not None:
            keys *= made.key_scales[row, stored, slots, None].double().cpu()
            values *= made.value_scales[row, stored, slots, None].double().cpu()
        for query_head in range(group * (number % heads), group * (number % heads + 1)):
            query = made.query[row, query_head, 0].double().cpu()
            logits = (keys @ query) * made.scaling
            if len(keys):
                terms = (keys.abs() @ query.abs()) * made.scaling
                largest_logit = max(largest_logit, float(terms.max()))
                largest_value[row, query_head] = values.abs().max()
            if made.softcap is not None:
                logits = made.softcap * torch.tanh(logits / made.softcap)
            extended = logits
            if made.sinks is not None:
                extended = torch.cat([logits, made.sinks[query_head, None].double().cpu()])
            log_sum_exp[row, query_head] = extended.logsumexp(0)
            weights = extended.softmax(0)[: len(keys)]
            output[row, query_head, 0] = weights @ values
            mass[row, stored, slots] += weights / group
    return Truth(output, log_sum_exp, mass, largest_value, largest_logit)

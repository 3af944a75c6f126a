"""How wide the loads of a kernel are.

A thread can fetch 16 bytes with one instruction. A load of a whole tensor that takes 2 or 4 bytes
at a time instead needs several times as many instructions, and on most GPUs a part of the bandwidth
is lost. Triton widens a load only if it can prove that addresses are aligned and contiguous.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

from .ptx import Program

WIDE = 8
"""Bytes of one load from which on it counts as vectorised."""

_Place = tuple[str, int, int]


@dataclass(frozen=True)
class BulkLoad:
    """A load, in the kernel's source, of more than a few numbers a thread."""

    line: int
    """Line of the source."""
    bytes: int
    """What one execution brings, over all threads."""
    widths: tuple[int, ...]
    """Bytes of each load instruction that it was compiled to; empty if none was found."""

    @property
    def vectorised(self) -> float:
        """Share of its bytes that comes through wide instructions."""
        wide = sum(width for width in self.widths if width >= WIDE)
        return wide / sum(self.widths) if self.widths else 0.0


@dataclass(frozen=True)
class Loads:
    """All global loads of a kernel."""

    widest: int
    """Bytes of the widest global load instruction; 0 without loads."""
    bulk: tuple[BulkLoad, ...]

    @property
    def vectorised(self) -> float | None:
        """Share of the bulk loads' bytes that comes through wide instructions; None without any."""
        total = sum(load.bytes for load in self.bulk)
        return sum(load.bytes * load.vectorised for load in self.bulk) / total if total else None


def look_at_loads(ttgir: str, program: Program, threads: int) -> Loads:
    """The loads of a kernel.

    A bulk load is one of a block of at least `WIDE` bytes a thread, of rank 2 (rows of a tensor) or
    of elements below 4 bytes. Whole 4-byte numbers in a row, such as lengths, scores or positions,
    are fetched at full speed one a thread, and a mask by length keeps Triton from widening them.

    Args:
        ttgir: the kernel in the form that still knows tensors; says what is a bulk load.
        program: the compiled kernel; says how wide each became.
        threads: threads of a block.
    """
    widths: dict[_Place, list[int]] = defaultdict(list)
    for instruction in program.instructions:
        if instruction.loads:
            widths[instruction.location].append(instruction.bytes)
    places = _places(ttgir)
    bulk: dict[_Place, int] = {}
    found = re.finditer(
        r"(?:tt\.load|ttg\.async_copy_global_to_local)\b[^\n]*?: "
        r"tensor<((?:\d+x)+)!tt\.ptr<(\w+)>[^\n]* loc\((.*)\)\s*$",
        ttgir,
        re.MULTILINE,
    )
    for shape, element, reference in (match.groups() for match in found):
        sizes = [int(size) for size in shape.split("x") if size]
        # f8E5M2 and its like have 8 bits, and i1 takes a byte.
        narrow = element.startswith("f8") or element == "i1"
        width = 1 if narrow else int(re.sub(r"\D", "", element)) // 8
        total = math.prod(sizes) * width
        rows = sum(size > 1 for size in sizes) > 1
        if total >= WIDE * threads and (rows or width < 4):
            place = _resolve(reference, places)
            bulk[place] = max(total, bulk.get(place, 0))
    loads = [BulkLoad(place[1], size, tuple(widths[place])) for place, size in bulk.items()]
    every = [width for found in widths.values() for width in found]
    return Loads(max(every, default=0), tuple(sorted(loads, key=lambda load: load.line)))


def _places(ttgir: str) -> dict[str, str]:
    return dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.MULTILINE))


def _resolve(reference: str, places: dict[str, str]) -> _Place:
    """File, line and column of a location, of the innermost function where calls were inlined."""
    for _ in range(20):
        if place := re.match(r'"([^"]*)":(\d+):(\d+)', reference):
            return place.group(1).rpartition("/")[2], int(place.group(2)), int(place.group(3))
        inner = re.search(r"#loc\d*", reference)
        if inner is None or inner.group() not in places:
            break
        reference = places[inner.group()]
    return "", 0, 0

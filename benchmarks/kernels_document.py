"""docs/gpu.md, from the figures of the benchmark of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .provenance import provenance
from .reporting import markdown_table

SHAPE = {"batch": 16, "budget": 512, "head_size": 128}
"""The cache whose evictions are spelled out, if it is among those computed."""


def draw(found: dict[str, Any], target: Path) -> None:
    """The benchmark draws its own picture."""


def compose(found: dict[str, Any], picture: str | None) -> str:
    """The document as Markdown."""
    content = found["kernels"]
    measured = content["device"] != "cpu"
    parts = [
        "# Kernels: bytes, and what a GPU can make of them",
        "Written by `python -m benchmarks.documents` from `benchmarks/results/kernels.json`; do "
        "not edit it by hand. `python -m benchmarks kernels` takes new figures, on a GPU if there "
        "is one. What the compiler makes of each kernel is in [kernels.md](kernels.md).",
    ]
    if measured:
        parts.append(provenance(content))
    else:
        parts.append(
            "**No GPU has been measured yet.** Bytes below are counted from real eviction plans; "
            "times are computed from published bandwidths and peak rates, the best that the "
            "hardware allows, launches excluded. They are not measurements."
        )
    if content["roofline"]:
        parts += _evictions(content["roofline"]) + _roofline(content["roofline"])
    if measured:
        parts += _measured(content, picture)
    return "\n\n".join(parts) + "\n"


def _evictions(roofline: list[dict[str, Any]]) -> list[str]:
    alike = [each for each in roofline if all(each[k] == v for k, v in SHAPE.items())]
    row = (alike or roofline)[0]
    heads = row["layers"] * row["batch"] * row["heads"]
    stored = row["budget"] + row["interval"]
    cache = heads * stored * row["head_size"] * row["element_bytes"] * 2
    gathered = row["evictions"]["gather and copy"]["moved"]
    return [
        "## One eviction",
        f"{row['layers']} layers, batch {row['batch']}, {row['heads']} KV heads of size "
        f"{row['head_size']}, bf16, {stored} tokens stored of which {row['budget']} stay, scores "
        f"at random. The cache holds {cache / 1e9:.2f} GB.",
        markdown_table(
            ("way", "bytes read and written", "against gather and copy", "transient", "of cache"),
            [
                (
                    way,
                    f"{figures['moved'] / 1e9:.3f} GB",
                    f"{figures['moved'] / gathered:.1%}",
                    f"{figures['transient'] / 1e6:.1f} MB",
                    f"{figures['transient'] / cache:.2%}",
                )
                for way, figures in row["evictions"].items()
            ],
        ),
    ]


def _roofline(roofline: list[dict[str, Any]]) -> list[str]:
    return [
        "## Best times, computed",
        "Decode step: attention of one token in all layers, the mass of each key included. "
        "Scoring: R-KV, with every similarity computed (the search ends early where it finds "
        "one). The last column is scoring and hole filling against the attention alone of the "
        "steps between two evictions; a step reads the model's weights as well.",
        markdown_table(
            (
                *("card", "batch", "budget", "head size", "decode step µs", "scoring µs"),
                *("hole filling µs", "compaction µs", "gather and copy µs", "of the interval"),
            ),
            [
                (
                    row["card"],
                    row["batch"],
                    row["budget"],
                    row["head_size"],
                    row["decode_seconds"] * 1e6,
                    row["scoring_seconds"] * 1e6,
                    *(way["seconds"] * 1e6 for way in row["evictions"].values()),
                    f"{row['share_of_interval']:.1%}",
                )
                for row in roofline
            ],
        ),
    ]


def _measured(content: dict[str, Any], picture: str | None) -> list[str]:
    parts = [
        f"## Measured: {content['device']}, {content['measured']}",
        f"torch's own copy reaches {content['copy_bandwidth']['median'] / 1e9:.1f} GB/s (median). "
        "Milliseconds, median and quartiles; sides of a row were timed in turns.",
    ]
    if picture:
        parts.append(f"![Kernel times]({picture})")
    parts.append(
        markdown_table(
            ("decode step of one layer", "batch", "budget", "head size", "ms", "quartiles"),
            [
                (name, row["batch"], row["budget"], row["head_size"], *_milliseconds(side))
                for row in content["decode"]
                for name, side in row["sides"].items()
            ],
        )
    )
    parts.append(
        markdown_table(
            ("event of all layers", "layers", "batch", "budget", "ms", "quartiles"),
            [
                (name, row["layers"], row["batch"], row["budget"], *_milliseconds(side))
                for row in content["events"]
                for name, side in row["sides"].items()
            ],
        )
    )
    return parts


def _milliseconds(side: dict[str, Any]) -> tuple[float, str]:
    seconds = side["seconds"]
    low, high = (each * 1e3 for each in seconds["quartiles"])
    return seconds["median"] * 1e3, f"{low:.2f} to {high:.2f}"

"""docs/allocation.md, from the figures of allocation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .provenance import provenance
from .reporting import markdown_table

KINDS = {"text": "English text", "chains": "Generated chains of thought"}
HEADER = (
    "policy, allocation",
    "MiB held",
    "tokens of a head",
    "KL",
    "95 % interval",
    "KL minus uniform's",
    "same top token",
)


def write(figures: Path, folder: Path) -> Path:
    """Write the document for the JSON file `figures` into `folder`, and return where it is."""
    content = json.loads(figures.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "allocation.md"
    target.write_text(compose(content))
    return target


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table, under `HEADER`."""
    fewest, most = row["fewest_tokens_of_a_head"], row["most_tokens_of_a_head"]
    return (
        f"{row['policy']}, {row['name']}",
        f"{row['bytes'] / 2**20:.2f}",
        str(fewest) if fewest == most else f"{fewest} to {most}",
        row["kl"],
        "{:.3f} to {:.3f}".format(*row["kl_interval"]),
        difference(row),
        row["agreement"],
    )


def difference(row: dict[str, Any]) -> str | None:
    """The difference in KL to the uniform allocation with its interval, as text."""
    if row["minus_uniform"] is None:
        return None
    low, high = row["minus_uniform"]["interval"]
    return f"{row['minus_uniform']['kl']:+.3f} ({low:+.3f} to {high:+.3f})"


def compose(content: dict[str, Any]) -> str:
    """The document as Markdown."""
    settings, rows = content["settings"], content["rows"]
    worst = max(content["chunks_against_single_tokens"]["greatest_difference"].values())
    parts = [
        "# Allocations of a budget",
        "Written by `python -m benchmarks.allocation` from `benchmarks/results/allocation.json`; "
        "do not edit it by hand.",
        provenance(content),
        f"Model: {settings['model']}. As in [quality.md](quality.md), known text is fed to the "
        "model with the cache, and every prediction after the first eviction is compared with that "
        "of one dense forward: mean KL(dense || cache) in nats per token. All allocations of a "
        "budget see the same tokens, after a first chunk that makes every layer evict, in chunks "
        f"of {settings['interval']} that are equivalent to single tokens (checked: "
        f"log-probabilities differ by at most {worst:.1e}). Bytes are those allocated for keys and "
        "values. Tokens of a head are those of the last eviction or later. Intervals are 95 % "
        "bootstrap intervals over texts and segments of 64 tokens; those of differences are "
        "paired.",
        "## Verdict",
        verdict(rows),
    ]
    for kind, budget in dict.fromkeys((row["kind"], row["budget"]) for row in rows):
        chosen = [row for row in rows if (row["kind"], row["budget"]) == (kind, budget)]
        parts += [
            f"## {KINDS.get(kind, kind)}, budget {budget}",
            f"{chosen[0]['tokens']} tokens.",
            markdown_table(HEADER, [cells(row) for row in chosen]),
        ]
    return "\n\n".join(parts) + "\n"


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the data says of each allocation: in how many cells it is closer to dense, surely."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows if row["minus_uniform"]):
        mine = [row for row in rows if row["name"] == name]
        surely = {"closer": [], "farther": []}  # type: dict[str, list[str]]
        closer = 0
        for row in mine:
            closer += row["minus_uniform"]["kl"] < 0
            low, high = row["minus_uniform"]["interval"]
            if high < 0 or low > 0:
                cell = f"{row['policy']} {row['budget']} {row['kind']}"
                surely["closer" if high < 0 else "farther"].append(cell)
        lines.append(
            f"- `{name}` is closer to the dense model than uniform in {closer} of {len(mine)} "
            f"cells; with an interval that excludes zero: closer in {len(surely['closer'])} "
            f"({', '.join(surely['closer']) or 'none'}), farther in {len(surely['farther'])} "
            f"({', '.join(surely['farther']) or 'none'})."
        )
    same = _same_bytes(rows)
    lines.append(
        "- The allocations of a cell hold the same bytes."
        if same
        else "- **The allocations of a cell do not all hold the same bytes: see the tables.**"
    )
    return "\n".join(lines)


def _same_bytes(rows: list[dict[str, Any]]) -> bool:
    cells_bytes: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        key = (row["kind"], row["budget"], row["policy"])
        cells_bytes.setdefault(key, set()).add(row["bytes"])
    return all(len(each) == 1 for each in cells_bytes.values())

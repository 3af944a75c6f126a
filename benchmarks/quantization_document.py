"""docs/quantization.md, from the figures of quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .provenance import provenance
from .reporting import markdown_table

KINDS = {"text": "English text", "chains": "Generated chains of thought"}
HEADER = (
    "policy, storage",
    "budget",
    "evictions",
    "MiB held",
    "share of dense",
    "KL",
    "95 % interval",
    "KL minus unquantized",
    "same top token",
)


def write(figures: Path, folder: Path) -> Path:
    """Write the document for the JSON file `figures` into `folder`, and return where it is."""
    content = json.loads(figures.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "quantization.md"
    target.write_text(compose(content))
    return target


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table, under `HEADER`."""
    return (
        f"{row['policy']}, {row['storage']}",
        row["budget"],
        row["evictions_per_row"],
        f"{row['bytes'] / 2**20:.2f}",
        row["bytes"] / row["bytes_dense"],
        f"{row['kl']:.4f}",
        "{:.4f} to {:.4f}".format(*row["kl_interval"]),
        difference(row),
        row["agreement"],
    )


def difference(row: dict[str, Any]) -> str | None:
    """The difference in KL to unquantized storage with its interval, as text."""
    if row["minus_base"] is None:
        return None
    low, high = row["minus_base"]["interval"]
    return f"{row['minus_base']['kl']:+.4f} ({low:+.4f} to {high:+.4f})"


def compose(content: dict[str, Any]) -> str:
    """The document as Markdown."""
    settings, rows = content["settings"], content["rows"]
    parts = [
        "# Keys and values in 8 bits",
        "Written by `python -m benchmarks.quantization` from "
        "`benchmarks/results/quantization.json`; do not edit it by hand.",
        provenance(content),
        f"Model: {settings['model']}, computing in {rows[0]['storage']}. "
        '`SparseBudgetCache(quantization="int8")` stores keys and values as 8-bit numbers with '
        "one float32 scale for each token of a head. The comparison is with storage as this model "
        "computes; a cache in 16 bits has half the bytes of one in float32, so against it int8 "
        "saves less: its share of the bytes is twice that in the tables. As in "
        "[quality.md](quality.md), known text is "
        "fed to the model with the cache, and every prediction is compared with that of one dense "
        "forward: mean KL(dense || cache) in nats per token. The three storages of a policy are "
        "measured on the same tokens, those after the first eviction of the unquantized one"
        f" ({_texts(settings)}). "
        '"Same bytes" is int8 with the largest budget whose `budget + interval` slots fit into '
        f"the unquantized cache's bytes (interval {settings['interval']}). Every prediction sees "
        "the tokens behind the prompt as they are stored, as in decoding, though tokens are fed in "
        f"chunks. {_check(content['chunks_against_single_tokens'])} Bytes are "
        "those allocated for keys and values, scales included. Evictions are per row and layer; a "
        "cache without any still holds the whole text. "
        "Intervals are 95 % bootstrap intervals over texts and segments of 64 tokens; those of "
        "differences are paired.",
        "## Verdict",
        verdict(rows),
    ]
    for kind, budget in dict.fromkeys((row["kind"], row["base_budget"]) for row in rows):
        chosen = [row for row in rows if (row["kind"], row["base_budget"]) == (kind, budget)]
        parts += [
            f"## {KINDS.get(kind, kind)}, the bytes of budget {budget}",
            f"{chosen[0]['tokens']} tokens.",
            markdown_table(HEADER, [cells(row) for row in chosen]),
        ]
    return "\n\n".join(parts) + "\n"


def _check(check: dict[str, Any]) -> str:
    """How far chunks and single tokens differ, on the check's short text."""
    each = ", ".join(
        f"{policy} {found['kl_of_chunks']:.4f} against {found['kl_of_single_tokens']:.4f}"
        for policy, found in check["policies"].items()
    )
    between = max(found["kl_between"] for found in check["policies"].values())
    return (
        "Chunks and single tokens round a number near the middle of two levels differently, so "
        f"they differ too: on {check['tokens']} tokens with budget {check['budget']}, KL to dense "
        f"by chunks against single tokens is {each}, and between the two at most {between:.4f}. "
        "Differences between storages of that size mean nothing."
    )


def _texts(settings: dict[str, Any]) -> str:
    kinds = [("texts", "text_tokens"), ("chains", "chain_tokens")]
    used = [(name, length) for name, length in kinds if settings[name]]
    return ", ".join(f"{settings[n]} {n} of {settings[length]} tokens" for n, length in used)


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the data says of int8 with the same budget and with the same bytes."""
    lines = []
    unquantized = {_cell(row): row for row in rows if row["minus_base"] is None}
    for name in dict.fromkeys(row["storage"] for row in rows if row["minus_base"]):
        mine = [row for row in rows if row["storage"] == name]
        shares = [row["bytes"] / unquantized[_cell(row)]["bytes"] for row in mine]
        tokens = [row["budget"] / row["base_budget"] for row in mine]
        changes = [row["minus_base"]["kl"] for row in mine]
        surely: dict[str, list[str]] = {"closer": [], "farther": []}
        for row in mine:
            low, high = row["minus_base"]["interval"]
            if high < 0 or low > 0:
                cell = f"{row['policy']} {row['base_budget']} {row['kind']}"
                surely["closer" if high < 0 else "farther"].append(cell)
        lines.append(
            f"- {name}: {_span(shares, '.3f')} of the bytes, {_span(tokens, '.2f')} times the "
            f"budget; KL changes by {_span(changes, '+.4f')}. Closer to the dense model than "
            f"unquantized storage in {sum(change < 0 for change in changes)} of {len(mine)} cells; "
            f"with an interval that excludes zero: closer in {len(surely['closer'])} "
            f"({', '.join(surely['closer']) or 'none'}), farther in {len(surely['farther'])} "
            f"({', '.join(surely['farther']) or 'none'})."
        )
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["base_budget"], row["policy"]


def _span(values: list[float], spec: str) -> str:
    least, most = format(min(values), spec), format(max(values), spec)
    return least if least == most else f"{least} to {most}"

"""The table of results as Markdown."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from .checks import FAULT, NO_CACHE, NOT_BUILT, NOTHING

REPLAYS = ("replay rkv", "replay keydiff", "replay random")

HEADER = """# Architectures

Every model type of transformers' causal-LM mapping, built tiny with random weights (float32, CPU)
and generated from with `SparseBudgetCache`. Written by `python -m tests.architectures.matrix`; do
not edit by hand.

What a row has passed:

- **lossless**: with a budget above the length, the tokens and logits of `DynamicCache` (1e-5).
- **replay**: with budget 16 and interval 4, a prompt of 30 and 40 new tokens, no layer ever holds
  more than 20 tokens, and the logits under `rkv`, `keydiff` and `random` equal those of one dense
  forward in which exactly the evicted tokens are masked (1e-4). The largest difference is given.
- **rows**: the rows of a left-padded batch (13, 19 and 30 tokens) give the tokens and logits (1e-4)
  that they give alone. "dense differs" where the model does not have this property with
  `DynamicCache` either.
- **policies**: `all`, or those that run.

Results: *passes* with query-based policies; *passes, key-only* where the model's own attention code
hides its queries (query-based policies refuse in one sentence); *nothing to evict* where all layers
are sliding-window or linear; *refused* in one sentence of ours; *no DynamicCache* where the model
does not run with transformers' own `DynamicCache`, or takes no notice of it.
"""


def escaped(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def difference(report: dict[str, Any], *names: str) -> str:
    """The worst of several checks: a difference, or a word."""
    texts = [report["checks"][name] for name in names if name in report["checks"]]
    values = []
    for text in texts:
        words = text.split()
        if text.startswith("FAULT"):
            return "**fault**"
        if text.startswith("dense differs"):
            return "dense differs"
        if words[0] == "ok" and len(words) > 1 and words[1][0].isdigit():
            values.append(float(words[1]))
    return f"{max(values):.0e}" if values else "-"


def policies(report: dict[str, Any]) -> str:
    """The policies that run, "all" when none was refused."""
    if not report["policies"]:
        return "-"
    return "all" if not report["refused_policies"] else ", ".join(report["policies"])


def summary_line(report: dict[str, Any]) -> str:
    """One line of progress."""
    reason = f": {report['reason']}" if report["reason"] else ""
    return f"{report['model_type']} {report['seconds']:.1f}s {report['result']}{reason}"[:400]


def write_report(reports: list[dict[str, Any]], out: Path) -> None:
    """Write the Markdown table with totals and versions."""
    totals = Counter(report["result"] for report in reports)
    built = len(reports) - totals[NOT_BUILT]
    dense = built - totals[NO_CACHE]
    lines = [
        HEADER,
        f"Versions: transformers {transformers.__version__}, torch {torch.__version__}.",
        "",
        f"{len(reports)} types, {built} built, {dense} of those run with a `DynamicCache`. "
        + "; ".join(f"{count} {result}" for result, count in totals.most_common())
        + ".",
        "",
        "| type | class | result | lossless | replay | rows | policies | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        result = report["result"]
        shown = f"**{result}**" if result == FAULT else result
        cells = [
            report["model_type"],
            report["model_class"] or "-",
            shown,
            difference(report, "lossless rkv", "lossless keydiff", "lossless config"),
            "-" if result == NOTHING else difference(report, *REPLAYS),
            difference(report, "rows dense", "rows rkv", "rows keydiff"),
            policies(report),
            escaped(report["reason"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")

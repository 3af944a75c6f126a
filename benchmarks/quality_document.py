"""docs/quality.md and its picture, from the figures of quality."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .provenance import provenance
from .quality import difference
from .reporting import markdown_table, pyplot, save_picture

KINDS = {"text": "English text", "chains": "generated chains of thought"}


def draw(found: dict[str, Any], target: Path) -> None:
    """KL and agreement against the budget, a line for every policy, a column for every kind."""
    plt = pyplot()
    rows = [row for row in found["quality"]["rows"] if row["name"] == row["policy"]]
    if plt is None or not rows:
        return
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    names = sorted({row["name"] for row in rows})
    figure, axes = plt.subplots(
        2, len(kinds), figsize=(5.4 * len(kinds), 6.4), squeeze=False, sharex=True
    )
    for column, kind in enumerate(kinds):
        for number, name in enumerate(names):
            chosen = [row for row in rows if row["kind"] == kind and row["name"] == name]
            chosen.sort(key=lambda row: row["budget"])
            budgets = [row["budget"] for row in chosen]
            style = {"color": f"C{number % 10}", "marker": "osD^v<>Pp*"[number % 10]}
            top, bottom = axes[0][column], axes[1][column]
            top.plot(budgets, [row["kl"] for row in chosen], label=name, **style)
            bottom.plot(budgets, [row["agreement"] for row in chosen], label=name, **style)
        axes[0][column].set_title(KINDS.get(kind, kind))
        axes[0][column].set_yscale("log")
        axes[1][column].set_xlabel("budget, tokens per layer and KV head")
        axes[1][column].set_xticks(sorted({row["budget"] for row in rows}))
    axes[0][0].set_ylabel("mean KL(dense || cache), nats")
    axes[1][0].set_ylabel("same most likely token")
    axes[0][-1].legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save_picture(figure, target)
    plt.close(figure)


def compose(found: dict[str, Any], picture: str | None) -> str:
    """The document as Markdown."""
    content = found["quality"]
    settings, rows = content["settings"], content["rows"]
    parts = [
        "# Quality of the policies",
        "Written by `python -m benchmarks.documents` from `benchmarks/results/quality.json`; do "
        "not edit it by hand. `python -m benchmarks.quality` takes new figures.",
        provenance(content),
        _method(content),
    ]
    if picture:
        parts.append(f"![Quality against budget]({picture})")
    parts += ["## Which policy", verdict(rows)]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for budget in settings["budgets"]:
            chosen = [r for r in rows if r["kind"] == kind and r["budget"] == budget]
            chosen.sort(key=lambda row: row["kl"])
            parts += [
                f"## {KINDS.get(kind, kind)[0].upper()}{KINDS.get(kind, kind)[1:]}, "
                f"budget {budget}",
                f"{chosen[0]['tokens']} tokens after the first eviction; perplexity of the dense "
                f"model {chosen[0]['dense_perplexity']:.3f}.",
                _table(chosen),
            ]
    return "\n\n".join(parts) + "\n"


def _method(content: dict[str, Any]) -> str:
    settings = content["settings"]
    check = content["chunks_against_single_tokens"]
    worst = max(check["greatest_difference"].values())
    return (
        f"Model: {settings['model']}. Known text is fed to the model with the cache (interval "
        f"{settings['interval']}, window and sinks as by default), and every prediction after the "
        "first eviction is compared with that of one dense forward: mean KL(dense || cache) in "
        "nats per token, the share of tokens where both name the same most likely next token, and "
        f"the perplexity of the text. {settings['texts']} pieces of {settings['text_tokens']} "
        "tokens of English text (help texts that come with Python and licence texts, or files that "
        f"were named), and {settings['chains']} chains of {settings['chain_tokens']} tokens that "
        f"the dense model itself sampled at temperature {settings['temperature']}. Text is fed in "
        "chunks that end where rows evict, so that every query sees exactly the tokens that it "
        f"would see if they came one by one (checked: log-probabilities differ by at most "
        f"{worst:.1e}). Intervals are 95 % bootstrap intervals over texts and segments of 64 "
        "tokens; with this few texts they are rough. The last column is the difference in KL to "
        "`streaming` on the same tokens, which is much better known than either figure."
    )


def _table(rows: list[dict[str, Any]]) -> str:
    return markdown_table(
        ("policy", "KL", "95 % interval", "same top token", "perplexity", "KL minus streaming's"),
        [
            (
                f"`{row['name']}`" if row["name"] == row["policy"] else row["name"],
                row["kl"],
                "{:.3f} to {:.3f}".format(*row["kl_interval"]),
                row["agreement"],
                row["perplexity"],
                difference(row, "streaming"),
            )
            for row in rows
        ],
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """What the data says: ranks over all kinds and budgets, and who is surely ahead of whom."""
    cells = list(dict.fromkeys((row["kind"], row["budget"]) for row in rows))
    by_cell = {
        cell: {r["name"]: r for r in rows if (r["kind"], r["budget"]) == cell} for cell in cells
    }
    names = [name for name in by_cell[cells[0]] if all(name in by_cell[c] for c in cells)]
    # KL differs by factors between budgets, so its logarithm is averaged: no cell outweighs others.
    overall = {
        name: math.exp(
            sum(math.log(max(by_cell[cell][name]["kl"], 1e-12)) for cell in cells) / len(cells)
        )
        for name in names
    }
    ranking = sorted(names, key=overall.__getitem__)
    plain = [name for name in ranking if by_cell[cells[0]][name]["policy"] == name]
    lines = [
        "Geometric mean of KL over all kinds of text and budgets: "
        + ", ".join(f"{name} {overall[name]:.3f}" for name in ranking)
        + ".",
        f"Best with its options as they are: `{plain[0]}`; best of all: {ranking[0]}.",
    ]
    for other in by_cell[cells[0]][ranking[0]]["against"]:
        if other in names:
            ahead = [n for n in ranking if n != other and _surely(by_cell, n, other, below=True)]
            behind = [n for n in ranking if n != other and _surely(by_cell, n, other, below=False)]
            lines.append(
                f"Closer to the dense model than `{other}` in every cell, with an interval that "
                f"excludes zero: {', '.join(ahead) or 'none'}. Farther in every cell likewise: "
                f"{', '.join(behind) or 'none'}."
            )
    if {"h2o", "rkv", "rkv weight 0.1", "streaming"} <= set(names):
        lines.append(_decision(overall))
    return "\n\n".join(lines)


def _decision(overall: dict[str, float]) -> str:
    """Which policy is the default, in words; the figures are those of this run."""
    kl = {name: f"{value:.3f}" for name, value in overall.items()}
    return (
        f"**The default is `rkv` with importance weight 0.5** ({kl['rkv']}). The published weight "
        f"of 0.1 ({kl['rkv weight 0.1']}) was no better than `streaming` ({kl['streaming']}) here, "
        "and among the R-KV variants around 0.5 the differences are smaller than the intervals. "
        f"By KL alone `h2o` would be the default ({kl['h2o']}): if closeness to the dense model is "
        "what counts, take it. `tova` and `snapkv` are ahead of `rkv` too, by less than the "
        "intervals; `rkv` stays the default because it alone weighs redundancy, which long chains "
        "of thought are full of and these short ones hardly test. "
        "`h2o` is not the default because it needs the attention probabilities "
        "of every step, a second pass over the keys in every layer, and because what it "
        "accumulates cannot be taken back, so it refuses assisted decoding; `rkv` looks at queries "
        "only before an eviction. One model of 135M parameters on three texts and three chains is "
        "little evidence: measure yours with `python -m benchmarks.quality --model MODEL`."
    )


def _surely(
    by_cell: dict[tuple[str, int], dict[str, dict[str, Any]]], name: str, other: str, *, below: bool
) -> bool:
    for cell in by_cell.values():
        low, high = cell[name]["against"][other]["interval"]
        if (high >= 0) if below else (low <= 0):
            return False
    return True

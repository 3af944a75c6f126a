"""Writes docs/recipe.md: what the methods of the recipe do on the tiny preset, and what they cost.

The figures are those of `sparse_cache.recipe.compare` (its `summary.json`, kept in results/ as
`recipe_study.json`, `recipe_distill.json` and `recipe_mixed.json`) and of `benchmarks.recipe`.
"""

from __future__ import annotations

from typing import Any

from sparse_cache.recipe.compare import as_table

from .provenance import provenance

PARTS = ("recipe_study", "recipe_distill", "recipe_mixed", "recipe")


def compose(figures: dict[str, Any], picture: str | None) -> str:
    """The document's text; `picture` is how it refers to the curves of the first seed."""
    lines = [
        "# Training under a budget: what the methods do",
        "",
        "Everything here comes from `python -m sparse_cache.recipe.compare` and "
        "`python -m benchmarks.recipe`; `python -m benchmarks.documents` wrote this page "
        "from their figures.",
        "",
    ]
    if "recipe_study" in figures:
        lines += _study(figures["recipe_study"], figures.get("recipe_distill"))
        if picture is not None:
            lines += [f"![Curves of the first seed]({picture})", ""]
    if "recipe_mixed" in figures:
        lines += _mixed(figures["recipe_mixed"])
    if "recipe" in figures:
        lines += _costs(figures["recipe"])
    return "\n".join(lines).rstrip() + "\n"


def _study(study: dict[str, Any], distill: dict[str, Any] | None) -> list[str]:
    rows = study["rows"]
    seeds = sorted({row["seed"] for row in rows})
    lines = [
        "## Four methods, one warm start",
        "",
        "The task is to recall values from the beginning of a prompt and add them up, in 49 tokens "
        "under a budget of 22; the model has 0.14 million parameters. A seed has its own warm "
        "start, prompts and sampling; its four runs begin with the same weights. Arrows lead from "
        "the first 10 steps to the last 10, and for accuracies (300 held-out prompts, greedy) "
        "from before "
        "training to after it. xi is the dense policy's probability of a sampled token over the "
        "sampler's.",
        "",
        "```sh",
        "python -m sparse_cache.recipe.compare --preset tiny --seeds "
        + " ".join(str(seed) for seed in seeds),
        "```",
        "",
        f"{study['date']}, {study['machine']}: {study['minutes']:.0f} minutes for {len(rows)} "
        f"runs, {study['at_once']} at a time, and {len(seeds)} warm starts. "
        f"{study.get('note', '')}".rstrip(),
        "",
        as_table(rows).rstrip(),
        "",
    ]
    decodings = [name for name in rows[0]["last"]]
    lines += ["Means over seeds, after training:", ""]
    lines += ["| method | " + " | ".join(f"accuracy, {name}" for name in decodings) + " |"]
    lines += ["|---|" + "---:|" * len(decodings)]
    before = {
        name: [row["first"][name] for row in rows if row["method"] == rows[0]["method"]]
        for name in decodings
    }
    table = {"warm start": before}
    for row in rows:
        for name in decodings:
            table.setdefault(row["method"], {}).setdefault(name, []).append(row["last"][name])
    for method, values in table.items():
        cells = [f"{sum(values[name]) / len(values[name]):.2f}" for name in decodings]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    lines.append("")
    if distill is not None:
        lines += [
            "### Which policy the distillation moves",
            "",
            "`smd` from the first seed's warm start, without distillation and with it in both "
            "directions. Replay does the work here; the differences are within their errors (up to "
            "2.9 points each). The default moves the shadow policy, because in a less careful "
            "setting (learning rate 4e-4, groups of 8, one seed) pulling the dense policy to the "
            "shadow one ended with both at 0, and pulling the other way did not.",
            "",
            as_table(distill["rows"]).rstrip(),
            "",
        ]
    return lines


def _mixed(mixed: dict[str, Any]) -> list[str]:
    return [
        "## Loss normalisers on answers of different lengths",
        "",
        f"Answers have 9 to 39 tokens (preset `mixed`, {mixed['rows'][0]['steps']} steps, one "
        "seed). `sequence` weighs every rollout alike (GRPO), `token` every token (DAPO), and "
        "`constant` divides by the longest possible length (Dr. GRPO), which makes gradients "
        "smaller. After training the three differ by no more than the error of an accuracy (2.9 "
        "points each), and all lose some dense accuracy.",
        "",
        as_table(mixed["rows"]).rstrip(),
        "",
    ]


def _costs(costs: dict[str, Any]) -> list[str]:
    lines = ["## Memory of rollouts", "", provenance(costs), ""]
    first = costs["memory"][0]
    lines += [
        f"Keys and values of two rollouts at budget {first['budget']} and interval "
        f"{first['interval']} (a random model of 2 layers; bytes do not depend on the weights):",
        "",
        "| new tokens | dense MiB | budget MiB |",
        "|---:|---:|---:|",
    ]
    for row in costs["memory"]:
        lines.append(
            f"| {row['tokens']} | {row['dense_bytes'] / 2**20:.2f} | "
            f"{row['sparse_bytes'] / 2**20:.2f} |"
        )
    lines.append("")
    if costs["steps"]:
        settings = costs["steps"][0]["settings"]
        lines += [
            "## Steps of a real model",
            "",
            f"SmolLM2-135M-Instruct with LoRA (rank {settings['lora-rank']}), float32, word "
            f"problems; {settings['prompts']} prompts of {settings['group']} rollouts with at most "
            f"{settings['new-tokens']} tokens, budget {settings['budget']}, interval "
            f"{settings['interval']}; {costs['steps'][0]['steps']} steps of each method, medians. "
            "It shows that they run and what they cost, not that they learn: it is too short.",
            "",
            "| method | s/step | rollout s | update s | KV MiB held | dense would hold | "
            "peak MiB | mismatch KL | xi p5 | rejected | reward | steps with a gradient | "
            "not a number |",
            "|---|" + "---:|" * 12,
        ]
        for row in costs["steps"]:
            lines.append(
                f"| {row['method']} | {row['seconds']:.1f} | {row['rollout_seconds']:.1f} | "
                f"{row['update_seconds']:.1f} | {row['kv_bytes_held'] / 2**20:.1f} | "
                f"{row['kv_bytes_dense'] / 2**20:.1f} | {row['peak_memory_mib']:.0f} | "
                f"{row['mismatch_kl']:.2f} | {row['xi_p5']:.2f} | {row['rejected']:.2f} | "
                f"{row['reward']:.2f} | {row['steps_with_gradient']} | {row['not_a_number']} |"
            )
        lines.append("")
    return lines

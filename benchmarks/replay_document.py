"""docs/replay.md, from the figures of replay and replay_cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .provenance import provenance
from .replay_cost import FORWARD
from .reporting import markdown_table, pyplot, save_picture


def compose(found: dict[str, Any], picture: str | None) -> str:
    """The document as Markdown.

    Args:
        found: the contents of `replay.json` and `replay_cost.json`.
        picture: where the picture is, as the document refers to it.
    """
    exact, cost = found["replay"], found["replay_cost"]
    settings = exact["settings"]
    parts = [
        "# Replay",
        "Written by `python -m benchmarks.documents` from `benchmarks/results/replay.json` and "
        "`replay_cost.json`; do not edit it by hand.",
        "## Exactness",
        provenance(exact),
        f"Model: {settings['model']}. In a left-padded batch of three prompts (160, 96 and 48 "
        f"tokens), `generate` sampled {settings['tokens']} tokens a row at temperature 1 under a "
        f"budget of {settings['budget']} and an interval of {settings['interval']}. One forward of "
        "the whole sequences under the recorded trace computes the sampled tokens' "
        "log-probabilities again (way `auto`, which gathers), and so does an ordinary dense "
        "forward. Figures are differences from the sampler's own log-probabilities, in nats.",
        _exactness(exact["exactness"], "float32"),
        _verdict(exact["exactness"]),
        *_amplified(exact["exactness"]),
        "In bfloat16 both are off by its rounding; what dense adds to that is the evictions:",
        _exactness(exact["exactness"], "bfloat16"),
        "## Bytes and the cost of recording",
        _bytes(exact["bytes"]),
        markdown_table(
            ("policy", "step with record=True / without", "quartiles"),
            [
                (
                    row["policy"],
                    row["ratio"]["median"],
                    "{:.3f} to {:.3f}".format(*row["ratio"]["quartiles"]),
                )
                for row in exact["overhead"]
            ],
        ),
        "Decoding steps at batch 1, evictions included, in turns in one process.",
        "## Cost of a learner's step",
        provenance(cost),
        "Forward and backward in float32 on a CPU, at budget "
        f"{cost['settings']['budget']} and interval {cost['settings']['interval']}, after a prompt "
        f"of {cost['settings']['prompt']}; every head keeps a random part of its tokens. Attention "
        "alone is that of one layer, dense by `scaled_dot_product_attention` with `is_causal`. The "
        "whole step is that of the model with gradient checkpointing and a loss on "
        "64 columns. Both sides took turns in one process; ratios are medians. Operations are "
        "counted (4 a pair and coordinate forward, 10 backward); *least* counts only pairs that "
        "the trace makes visible. Peak memory is that of a process which does nothing else, beyond "
        "its inputs.",
        *([f"![Cost against length]({picture})"] if picture else []),
        _cost(cost),
        "## Memory of log-probabilities",
        "Peak memory of `rollout_logprobs` with its backward, against logits of all tokens at once "
        "(a model with a vocabulary of 150,000, hidden size 64, in processes of their own):",
        markdown_table(
            ("tokens", "all logits, MiB", "in chunks, MiB"),
            [
                (str(row["tokens"]), _whole(row["naive_peak_mib"]), _whole(row["chunks_peak_mib"]))
                for row in cost["logprobs"]
            ],
        ),
    ]
    parts += ["## On a GPU", _on_a_gpu()]
    return "\n\n".join(parts) + "\n"


def _on_a_gpu() -> str:
    """Why there is a kernel, by counting."""
    memory, products = 3.35e12, 989e12  # bytes and bfloat16 operations a second of an H100 SXM
    size = 128
    operations = FORWARD * size
    # float32 logits: written, read for the maximum, read and written by two steps of the softmax,
    # read for the sum and for the second product.
    traffic = 4 * (1 + 1 + 2 * 2 + 1 + 1)
    compute, travel = operations / products, traffic / memory
    return (
        "Computed, not measured; nothing here has run on a GPU. For a pair of a query and a key at "
        f"head size {size} the forward's two products are {operations} operations, "
        f"{compute * 1e12:.1f} ps at the {products / 1e12:.0f} "
        "bfloat16 TFLOP/s of an H100 SXM (data "
        "sheet). Gathering in torch takes the pair's logit through memory "
        f"{traffic // 4} times, {traffic} bytes, which at {memory / 1e12:.2f} TB/s are "
        f"{travel * 1e12:.1f} ps: {travel / compute:.0f} times as "
        "long. So gathering is far from its "
        "limit there, and a Triton kernel "
        "(`kernels/replay_attention/`) takes its place: it reads the "
        "living keys through an index and keeps logits in registers. A key's queries lie side by "
        "side, from its own column to its death, so its gradient is summed by one program, without "
        "atomics, and is the same in every run. FlexAttention can "
        "skip a block of 128 keys only when "
        "all of them are dead, which eviction by content hardly ever brings about."
    )


def _exactness(rows: list[dict[str, Any]], dtype: str) -> str:
    return markdown_table(
        (
            "policy",
            "attention",
            "budgets",
            "evictions",
            "replay, most",
            "dense, most",
            "dense, mean",
        ),
        [
            (
                row["policy"],
                row["attention"],
                row["allocation"]
                if row["prefill_chunk"] is None
                else f"prompt in chunks of {row['prefill_chunk']}",
                str(row["evictions"]),
                f"{row['replay_max']:.1e}",
                f"{row['dense_max']:.2f}",
                f"{row['dense_mean']:.3f}",
            )
            for row in rows
            if row["dtype"] == dtype
        ],
    )


def _verdict(rows: list[dict[str, Any]]) -> str:
    found = [row for row in rows if row["dtype"] == "float32"]
    worst = max(row["replay_max"] for row in found)
    return (
        f"The greatest difference of replay in float32 is {worst:.1e} "
        f"({'within' if worst <= 1e-4 else 'NOT within'} the aim of 1e-4); dense recomputation is "
        f"off by up to {max(row['dense_max'] for row in found):.1f} nats on a token."
    )


def _amplified(rows: list[dict[str, Any]]) -> list[str]:
    """What float64 says of a policy that is not within the aim in float32."""
    wide = [row for row in rows if row["dtype"] == "float64"]
    return [
        "A model whose first tokens are evicted, as by "
        f"`{row['policy']}`, amplifies the rounding of "
        f"float32; in float64 the same rollout is replayed to {row['replay_max']:.1e}, and a dense "
        f"forward is off by {row['dense_max']:.1f}."
        for row in wide
    ]


def _bytes(rows: list[dict[str, Any]]) -> str:
    (row,) = rows
    return (
        f"A trace has 4 bytes for each token, layer and KV head: {row['share']:.2%} of the bytes "
        f"of this model's dense cache in float32, and {row['file_share']:.2%} in a "
        "file, which has 2 bytes below 32,767 tokens. Computed for other caches: 0.78 % at head "
        "size 128 in 16 bits (0.39 % in a file), 1.56 % at head size 64 in 16 bits (0.78 % in a "
        "file)."
    )


def _cost(cost: dict[str, Any]) -> str:
    rows = []
    for row in cost["attention"]:
        dense = row["dense_operations"]
        rows.append(
            (
                f"attention, {row['shape']}",
                str(row["tokens"]),
                row["ratio"]["median"],
                "{:.3f} to {:.3f}".format(*row["ratio"]["quartiles"]),
                row["gather_operations"] / dense,
                row["visible_operations"] / dense,
                _whole(row["gather_peak_mib"]),
                _whole(row["dense_peak_mib"]),
            )
        )
    for row in cost["step"]:
        rows.append(
            (
                f"whole step, {row['model']}, {row['threads']} threads",
                str(row["tokens"]),
                row["ratio"]["median"],
                "{:.3f} to {:.3f}".format(*row["ratio"]["quartiles"]),
                *[None] * 4,
            )
        )
    header = (
        "what",
        "tokens",
        "time, gather / dense",
        "quartiles",
        "operations, gather / dense",
        "least / dense",
        "gather MiB",
        "dense MiB",
    )
    return markdown_table(header, rows)


def _whole(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def draw(found: dict[str, Any], target: Path) -> None:
    """Time ratio against length."""
    plt = pyplot()
    if plt is None:
        return
    cost = found["replay_cost"]
    figure, axes = plt.subplots(figsize=(7, 4))
    series: dict[str, list[dict[str, Any]]] = {}
    for row in cost["attention"]:
        series.setdefault(f"attention, {row['shape']}", []).append(row)
    for row in cost["step"]:
        series.setdefault(f"whole step, {row['model']}", []).append(row)
    for name, rows in series.items():
        lengths = [row["tokens"] for row in rows]
        axes.plot(lengths, [row["ratio"]["median"] for row in rows], marker="o", label=name)
        low, high = zip(*(row["ratio"]["quartiles"] for row in rows), strict=True)
        axes.fill_between(lengths, low, high, alpha=0.15)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["tokens"] for rows in series.values() for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("time, replay / dense")
    axes.set_title("Forward and backward of the learner under replay", loc="left")
    axes.legend(frameon=False)
    save_picture(figure, target)
    plt.close(figure)

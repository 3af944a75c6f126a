"""docs/speed.md and its picture, from the figures of decode, soak and nochange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .nochange import control
from .provenance import provenance
from .reporting import markdown_table, pyplot, save_picture


def draw(found: dict[str, Any], target: Path) -> None:
    """Bars of overhead against targets, and of the speed-up."""
    plt = pyplot()
    if plt is None or "decode" not in found:
        return
    decode = found["decode"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), width_ratios=(2, 1))
    rows = decode["overhead"]
    names = [f"{row['model']}\n{row['policy']}\nbatch {row['batch']}" for row in rows]
    medians = [row["ratio"]["median"] for row in rows]
    lows = [row["ratio"]["median"] - row["ratio"]["quartiles"][0] for row in rows]
    highs = [row["ratio"]["quartiles"][1] - row["ratio"]["median"] for row in rows]
    left.bar(range(len(rows)), medians, yerr=[lows, highs], width=0.6, color="tab:blue")
    for place, row in enumerate(rows):
        if row["target"] is not None:
            left.plot([place - 0.4, place + 0.4], [row["target"]] * 2, color="tab:red")
    left.axhline(1, color="0.5", linewidth=0.8)
    left.set_xticks(range(len(rows)), names, fontsize=6)
    left.set_ylim(bottom=0.8)
    left.set_title("decode step, cache / dense of constant size (red: target)", fontsize=9)
    speedup = decode["speedup"]
    right.bar(
        range(len(speedup)),
        [row["speedup"]["median"] for row in speedup],
        width=0.5,
        color="tab:green",
    )
    right.axhline(1, color="0.5", linewidth=0.8)
    right.set_xticks(range(len(speedup)), [f"{row['context']} tokens" for row in speedup])
    right.set_title("dense step / step with the cache", fontsize=9)
    save_picture(figure, target)
    plt.close(figure)


def compose(found: dict[str, Any], picture: str | None) -> str:
    """The document as Markdown."""
    parts = [
        "# Speed and memory",
        "Written by `python -m benchmarks.documents` from `benchmarks/results/*.json`; do not edit "
        "it by hand. `make bench` takes new figures.",
    ]
    if "decode" in found:
        parts += _decode(found["decode"], picture)
    if "soak" in found:
        parts += _soak(found["soak"])
    if "nochange" in found:
        parts += _nochange(found["nochange"])
    return "\n\n".join(parts) + "\n"


def _decode(content: dict[str, Any], picture: str | None) -> list[str]:
    settings = content["settings"]
    budget, interval = settings["budget"], settings["interval"]
    parts = ["## Decode steps", provenance(content)]
    if picture:
        parts.append(f"![Decode step times]({picture})")
    parts += [
        f"Time of a step with the cache (budget {budget}, interval {interval}, evictions "
        f"included) over the time of a step with a `DynamicCache` that holds a constant "
        f"{budget + interval} tokens. Both take turns of {settings['turn']} steps in one process; "
        f"each ratio covers a whole period of {interval} steps. *Plain step* is the same ratio "
        "for the steps that do not evict.",
        markdown_table(
            (
                "model",
                "policy",
                "batch",
                "ratio",
                "quartiles",
                "target",
                "met",
                "plain step",
                "one eviction, ms",
                "dense step, ms",
            ),
            [
                (
                    row["model"],
                    row["policy"],
                    row["batch"],
                    row["ratio"]["median"],
                    "{:.3f} to {:.3f}".format(*row["ratio"]["quartiles"]),
                    row["target"],
                    row["met"],
                    row["plain_step_ratio"],
                    row["eviction_ms"],
                    row["dense_step_ms"],
                )
                for row in content["overhead"]
            ],
        ),
        _targets(content["overhead"]),
    ]
    if content["speedup"]:
        parts += [
            "Time of a dense step with a long context over the time of a step with the cache, "
            f"batch 1, R-KV, budget {budget}:",
            markdown_table(
                ("model", "dense context", "speed-up", "quartiles", "dense ms", "cache ms"),
                [
                    (
                        row["model"],
                        row["context"],
                        row["speedup"]["median"],
                        "{:.3f} to {:.3f}".format(*row["speedup"]["quartiles"]),
                        row["dense_step_ms"],
                        row["sparse_step_ms"],
                    )
                    for row in content["speedup"]
                ],
            ),
        ]
    for profile in content["profiles"]:
        parts += [
            f"Where a period goes with `{profile['policy']}` ({profile['model']}, batch 1), as a "
            "share of the profiled time, callees included. The profiler stretches small calls:",
            markdown_table(
                ("function", "calls", "share"),
                [
                    (f"`{row['function']}`", row["calls"], row["share_with_callees"])
                    for row in profile["functions"][:8]
                ],
            ),
        ]
    return parts


def _targets(rows: list[dict[str, Any]]) -> str:
    missed = [row for row in rows if row["met"] is False]
    aimed = [row for row in rows if row["met"] is not None]
    if not missed:
        return f"All {len(aimed)} targets are met."
    names = ", ".join(f"{row['model']} / {row['policy']} / batch {row['batch']}" for row in missed)
    return f"{len(aimed) - len(missed)} of {len(aimed)} targets are met; missed: {names}."


def _soak(content: dict[str, Any]) -> list[str]:
    settings = content["settings"]
    megabyte = 2**20
    rows = [
        (
            run["model"],
            run["tokens"],
            f"{run['tokens_per_second']:.1f}",
            f"{run['resident_start'] / megabyte:.1f}",
            f"{run['resident_warm'] / megabyte:.1f}",
            f"{run['resident_end'] / megabyte:.1f}",
            f"{run['most_tokens_stored']} ({run['limit_of_tokens_stored']})",
            run["kv_bytes"],
            run["kv_bytes_constant"],
            run["kv_bytes_over_full_layers"],
            run["dense_kv_bytes"],
        )
        for run in content["runs"]
    ]
    return [
        "## Long generations",
        provenance(content),
        f"`model.generate` with budget {settings['budget']}, interval {settings['interval']}, "
        f"policy `{settings['policy']}`. Resident memory of the process in MiB before the first "
        "token, after the warm-up (the first tenth of the run), and at the end. KV bytes are those "
        "of the storages behind the layers' keys and values; *of full* is their share of "
        "(budget + interval) tokens.",
        markdown_table(
            (
                "model",
                "tokens",
                "tokens/s",
                "start",
                "warm",
                "end",
                "most tokens stored (limit)",
                "KV bytes",
                "constant",
                "of full",
                "dense KV bytes",
            ),
            rows,
        ),
    ]


def _nochange(content: dict[str, Any]) -> list[str]:
    bits = content["bits"]
    return [
        "## Models that do not use the cache",
        provenance(content),
        "Outputs of a model in one process before and after the library was imported and used on "
        "that very model, compared bit for bit:",
        markdown_table(
            ("model", *bits[0]["equal_bits"], "numbers compared"),
            [
                (
                    row["model"],
                    *("equal" if same else "different" for same in row["equal_bits"].values()),
                    row["numbers_compared"],
                )
                for row in bits
            ],
        ),
        "Time of a decode step with a `DynamicCache` in a process that has used the library, over "
        "that in processes that have not, taking turns; *control* is the same ratio between two "
        "processes without it:",
        markdown_table(
            ("model", "ratio", "quartiles", "control", "quartiles", "step, ms"),
            [
                (
                    row["model"],
                    row["ratio"]["median"],
                    "{:.3f} to {:.3f}".format(*row["ratio"]["quartiles"]),
                    *control(row),
                    row["step_ms"],
                )
                for row in content["times"]
            ],
        ),
    ]

"""The kernels: bandwidth, decode step, scoring, eviction, against what torch offers.

On a GPU the Triton kernels are measured, on a CPU their references in torch: never the interpreter.
All sides of a comparison run in turns in one process. Without a GPU a table of roofline times is
added, computed from bytes and operations and marked so.

    python -m benchmarks.kernels
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from sparse_cache.kernels.decode_attention import decode_attention
from sparse_cache.kernels.eviction import (
    compact,
    fill_holes,
    plan_compaction,
    plan_hole_filling,
)
from sparse_cache.kernels.redundancy import redundancy
from sparse_cache.kernels.window_importance import window_importance

from .pairing import spread
from .reporting import common_options, parse, print_table, pyplot, save_picture, write_results
from .roofline import CARDS, Shape, roofline_table

Side = tuple[Callable[[], object], Callable[[], object]]
"""What is timed, and what sets the state back and is not."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `kernels.json` and `kernels.png`, and return what was written."""
    options = _options(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    copy = _copy_bandwidth(device, options)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "measured": "Triton kernels" if device.type == "cuda" else "references in torch",
        "copy_bandwidth": copy,
        "decode": [
            _decode(Shape(**each), device, copy["median"], options) for each in _grid(options)
        ],
        "events": [_events(Shape(**each), device, options) for each in _event_grid(options)],
        "roofline": [] if device.type == "cuda" else roofline_table(_roofline_shapes(options)),
    }
    _print(results)
    write_results("kernels", options, results)
    _draw(results, options)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Decode attention, scoring and eviction, kernel by kernel.")
    parser.add_argument("--rounds", type=int, default=None, help="timings of every side")
    options = parse(parser, arguments)
    if options.rounds is None:
        options.rounds = 3 if options.quick else 15 if torch.cuda.is_available() else 7
    return options


def _grid(options: argparse.Namespace) -> list[dict[str, int]]:
    """Of the decode step, which is one layer's."""
    if options.quick:
        return [{"layers": 1, "batch": 1, "budget": 64, "interval": 16, "head_size": 64}]
    small = not torch.cuda.is_available()
    return [
        {"layers": 1, "batch": batch, "budget": budget, "head_size": size}
        for batch in ((1, 4) if small else (1, 16, 64, 256))
        for budget in ((256, 512) if small else (256, 512, 1024, 2048))
        for size in ((64, 128) if small else (64, 128, 256))
    ]


def _event_grid(options: argparse.Namespace) -> list[dict[str, int]]:
    if options.quick:
        return [{"layers": 2, "batch": 1, "heads": 2, "budget": 64, "interval": 16}]
    if not torch.cuda.is_available():
        return [{"layers": 4, "batch": batch} for batch in (1, 4)]
    return [
        {"layers": 32, "batch": batch, "budget": budget, "head_size": size}
        for batch in (1, 16, 64)
        for budget in (256, 512, 2048)
        for size in (64, 128, 256)
    ]


def _roofline_shapes(options: argparse.Namespace) -> list[Shape]:
    batches, budgets, sizes = (
        ((1,), (256,), (64,)) if options.quick else ((1, 16, 256), (256, 512, 2048), (64, 128, 256))
    )
    return [
        Shape(batch=batch, budget=budget, head_size=size)
        for batch in batches
        for budget in budgets
        for size in sizes
        if (budget, size) in ((512, 128), (512, 64), (512, 256)) or size == sizes[len(sizes) // 2]
    ]


def _copy_bandwidth(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes a second, read and written, of torch's own copy."""
    size = (4 if options.quick else 64) * 2**20 if device.type == "cpu" else 2**30
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    times = _in_rotation({"copy": (lambda: target.copy_(source), _nothing)}, device, options)
    return spread([2 * size / each for each in times["copy"][0]])


def _decode(
    shape: Shape, device: torch.device, copy: float, options: argparse.Namespace
) -> dict[str, Any]:
    """One layer's attention of one token."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stored = shape.budget + shape.interval
    heads, size = shape.heads, shape.head_size
    query = torch.randn(shape.batch, heads * shape.group, 1, size, device=device, dtype=dtype)
    keys, values = torch.randn(
        2, shape.batch, heads, stored, size, device=device, dtype=dtype
    ).unbind()
    lengths = torch.full((shape.batch,), stored, dtype=torch.int32, device=device)
    mask = torch.ones(shape.batch, 1, 1, stored, dtype=torch.bool, device=device)
    mass = torch.zeros(shape.batch, heads, stored, device=device)
    scaling = 1 / math.sqrt(size)
    attention = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: decode_attention(query, keys, values, lengths, scaling=scaling),
        "ours with mass": lambda: decode_attention(
            query, keys, values, lengths, scaling=scaling, mass=mass
        ),
        "sdpa": lambda: attention(query, keys, values, enable_gqa=True),
        "sdpa with mask": lambda: attention(query, keys, values, attn_mask=mask, enable_gqa=True),
    }
    if device.type == "cuda":
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention)
        calls["flex attention"] = lambda: compiled(query, keys, values, enable_gqa=True)
        if shape.batch == 1 and importlib.util.find_spec("flashinfer"):
            import flashinfer

            # Its batched form reads pages; this is its form for one sequence.
            calls["flashinfer"] = lambda: flashinfer.single_decode_with_kv_cache(
                query[0, :, 0], keys[0], values[0], kv_layout="HND"
            )
    with torch.no_grad():
        times = _in_rotation(
            {name: (call, _nothing) for name, call in calls.items()}, device, options
        )
    moved = keys.nbytes + values.nbytes
    return {
        **vars(shape),
        "stored": stored,
        "dtype": str(dtype),
        "sides": {
            name: {
                "seconds": spread(taken),
                "bytes_a_second": moved / spread(taken)["median"],
                "share_of_copy": moved / spread(taken)["median"] / copy,
                "peak_bytes": peak,
            }
            for name, (taken, peak) in times.items()
        },
    }


def _events(shape: Shape, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Scoring and eviction of all layers at once."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stored = shape.budget + shape.interval
    sizes = (shape.batch, shape.heads)
    keys, values, slots, places = [], [], [], []
    for _ in range(shape.layers):
        keys.append(torch.randn(*sizes, stored, shape.head_size, device=device, dtype=dtype))
        values.append(torch.randn_like(keys[-1]))
        counted = torch.arange(stored, dtype=torch.int32, device=device).expand(*sizes, stored)
        slots.append(counted.clone())
        places.append(counted.clone())
    wanted = (shape.batch, shape.heads * shape.group, shape.window, shape.head_size)
    queries = [torch.randn(wanted, device=device, dtype=dtype) for _ in keys]
    every = (shape.layers, *sizes)
    scores = torch.rand(*every, stored, device=device)
    lengths = torch.full(every, stored, dtype=torch.int32, device=device)
    keep = torch.full(every, shape.budget, dtype=torch.int32, device=device)
    protected = {"window": shape.window, "sinks": 4}

    def hole_filling() -> None:
        plan = plan_hole_filling(
            scores, places, slots, lengths, keep, most_evicted=shape.interval, **protected
        )
        fill_holes(keys, plan)
        fill_holes(values, plan)

    def compaction() -> None:
        kept = plan_compaction(scores, places, lengths, keep, most_kept=shape.budget, **protected)
        for tensors in (keys, values, places):
            compact(tensors, kept, keep)

    def gather_and_copy() -> None:
        for layer in range(shape.layers):
            kept = scores[layer].topk(shape.budget, dim=-1).indices.sort(dim=-1).values
            for tensor in (keys[layer], values[layer]):
                rows = kept.unsqueeze(-1).expand(-1, -1, -1, shape.head_size)
                tensor[:, :, : shape.budget] = tensor.gather(2, rows)
            places[layer][:, :, : shape.budget] = places[layer].gather(2, kept)

    def set_back() -> None:
        for tensor in (*places, *slots):
            tensor.copy_(torch.arange(stored, dtype=torch.int32, device=device))

    scaling = 1 / math.sqrt(shape.head_size)
    sides: dict[str, Side] = {
        "hole filling": (hole_filling, set_back),
        "compaction": (compaction, set_back),
        "gather and copy": (gather_and_copy, set_back),
        "window importance": (
            lambda: window_importance(
                queries, keys, None, lengths, stored, window=shape.window, scaling=scaling
            ),
            _nothing,
        ),
        "redundancy": (
            lambda: redundancy(keys, None, lengths, stored, similarity_threshold=0.5),
            _nothing,
        ),
    }
    with torch.no_grad():
        times = _in_rotation(sides, device, options)
    return {
        **vars(shape),
        "dtype": str(dtype),
        "cache_bytes": sum(tensor.nbytes for tensor in (*keys, *values)),
        "sides": {
            name: {"seconds": spread(taken), "peak_bytes": peak}
            for name, (taken, peak) in times.items()
        },
    }


def _in_rotation(
    sides: dict[str, Side], device: torch.device, options: argparse.Namespace
) -> dict[str, tuple[list[float], int | None]]:
    """Seconds of every side, in turns of one, each round beginning with another side; and the
    most memory that a call took beyond what was allocated before, which only a GPU tells."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, int | None] = dict.fromkeys(names)
    for call, after in sides.values():  # compiles, and fills caches
        call()
        after()
    for number in tqdm(range(options.rounds), leave=False, disable=None):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            call, after = sides[name]
            if device.type == "cuda":
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                times[name].append(begin.elapsed_time(end) / 1000)
                peaks[name] = max(peaks[name] or 0, torch.cuda.max_memory_allocated() - held)
            else:
                begun = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - begun)
            after()
    return {name: (times[name], peaks[name]) for name in names}


def _nothing() -> None:
    """There is no state to set back."""


def _print(results: dict[str, Any]) -> None:
    copy = results["copy_bandwidth"]["median"]
    print(f"\n{results['device']}, {results['measured']}; torch's copy: {copy / 1e9:.1f} GB/s")
    print_table(
        "Decode step of one layer",
        ("side", "batch", "budget", "head size", "ms", "of copy bandwidth"),
        [
            (
                name,
                row["batch"],
                row["budget"],
                row["head_size"],
                side["seconds"]["median"] * 1e3,
                side["share_of_copy"],
            )
            for row in results["decode"]
            for name, side in row["sides"].items()
        ],
    )
    print_table(
        "Events of all layers",
        ("what", "layers", "batch", "budget", "head size", "ms"),
        [
            (
                name,
                row["layers"],
                row["batch"],
                row["budget"],
                row["head_size"],
                side["seconds"]["median"] * 1e3,
            )
            for row in results["events"]
            for name, side in row["sides"].items()
        ],
    )
    if results["roofline"]:
        print_table(
            "COMPUTED from bytes and operations, NOT MEASURED: roofline times in microseconds",
            (
                "card",
                "batch",
                "budget",
                "head size",
                "decode step",
                "scoring",
                "hole filling",
                "compaction",
                "gather and copy",
                "% of interval",
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
                    row["share_of_interval"] * 100,
                )
                for row in results["roofline"]
            ],
        )


def _draw(results: dict[str, Any], options: argparse.Namespace) -> None:
    plt = pyplot()
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    names = list(results["decode"][0]["sides"])
    for name in names:
        rows = [row for row in results["decode"] if name in row["sides"]]
        seconds = [row["sides"][name]["seconds"]["median"] * 1e3 for row in rows]
        left.plot(range(len(rows)), seconds, marker="o", label=name)
    left.set_xticks(
        range(len(results["decode"])),
        [f"B{r['batch']} n{r['budget']} D{r['head_size']}" for r in results["decode"]],
        rotation=60,
        fontsize=7,
    )
    left.set(
        ylabel="ms",
        yscale="log",
        title=f"Decode step, measured: {results['device']},\n{results['measured']}",
    )
    left.legend(fontsize=7)
    rows = results["roofline"]
    if rows:
        shape = rows[len(rows) // 2]
        shown = [
            row
            for row in rows
            if all(row[name] == shape[name] for name in ("batch", "budget", "head_size"))
        ]
        ways = list(shown[0]["evictions"])
        for number, way in enumerate(ways):
            right.bar(
                [place + number / 4 for place in range(len(CARDS))],
                [row["evictions"][way]["seconds"] * 1e6 for row in shown],
                0.25,
                label=way,
            )
        right.set_xticks([place + 0.25 for place in range(len(CARDS))], [c.name for c in CARDS])
        right.set(
            ylabel="µs",
            title="Eviction of all layers: roofline,\ncomputed, not measured "
            f"(batch {shape['batch']}, {shape['budget']} + {shape['interval']} tokens)",
        )
    else:
        row = results["events"][0]
        right.bar(
            list(row["sides"]), [side["seconds"]["median"] * 1e3 for side in row["sides"].values()]
        )
        right.tick_params(axis="x", rotation=30, labelsize=7)
        right.set(ylabel="ms", title=f"Events of {row['layers']} layers, batch {row['batch']}")
    right.legend(fontsize=7)
    figure.tight_layout()
    save_picture(figure, options.output / "kernels.png")
    plt.close(figure)


if __name__ == "__main__":
    main()

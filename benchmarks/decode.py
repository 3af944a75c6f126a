"""How much slower a decode step gets with the cache, and how much faster than a dense one.

Overhead: a step with `SparseBudgetCache(budget=B, interval=I)` in its steady state, evictions
included, against a step with a `DynamicCache` that holds a constant B + I tokens. That rival is
strict: our cache holds between B and B + I tokens, the rival always the most, and taking its new
token back is not timed. Both take turns in one process; every ratio covers whole periods of I
steps, so each holds exactly one eviction.

Speed-up: a dense step at 4k and 8k tokens of context against a sparse step, measured likewise.

    python -m benchmarks.decode --model tiny --policies all
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .models import open_model
from .pairing import PairedTimes, spread, time_in_turns
from .reporting import common_options, parse, print_table, write_results
from .runs import DenseDecoding, SparseDecoding

TARGETS = {"rkv": 1.15, "streaming": 1.05}
"""Greatest acceptable overhead by policy."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `decode.json`, and return what was written."""
    options = _options(arguments)
    names = [options.model] if options.only or options.quick else ["tiny", "small", options.model]
    policies = _policies(options.policies)
    overhead, speedup, profiles = [], [], []
    for name in dict.fromkeys(names):
        model, _ = open_model(name, options.seed)
        main_model = name == options.model
        for batch in options.batch:
            for policy in policies:
                overhead.append(_overhead(model, name, batch, policy, options))
        if main_model:
            for context in options.contexts:
                speedup.append(_speedup(model, name, context, options))
            if options.profile:
                profiles = [_profile(model, name, policy, options) for policy in policies]
    _print(overhead, speedup, profiles)
    results = {"overhead": overhead, "speedup": speedup, "profiles": profiles}
    write_results("decode", options, results)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Decode step times with and without the cache.")
    parser.add_argument("--only", action="store_true", help="measure --model, not tiny and small")
    parser.add_argument("--policies", nargs="+", default=["rkv", "streaming"], help="or: all")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--turn", type=int, default=16, help="steps before the other side's turn")
    parser.add_argument("--periods", type=int, default=5, help="ratios taken per comparison")
    parser.add_argument("--contexts", nargs="*", type=int, default=[4096, 8192])
    parser.add_argument("--mask", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    options = parse(parser, arguments)
    if options.quick:
        options.batch, options.periods = [1, 2], 2
        options.budget, options.interval, options.turn = 64, 16, 8
        options.contexts = [256]
    return options


def _policies(names: list[str]) -> list[str]:
    if names == ["all"]:
        from sparse_cache.policies import policy_names

        return policy_names()
    return names


def _overhead(
    model: Any, name: str, batch: int, policy: str, options: argparse.Namespace
) -> dict[str, Any]:
    budget, interval = options.budget, options.interval
    sparse = SparseDecoding(
        model, batch=batch, budget=budget, interval=interval, policy=policy, masked=options.mask
    )
    dense = DenseDecoding(
        model, batch=batch, tokens=budget + interval, constant=True, masked=options.mask
    )
    # Larger batches of a real model take long; their steps are also less noisy.
    periods = options.periods if batch == 1 else max(2, options.periods - 2)
    label = f"{name}, batch {batch}, {policy}"
    _warm_up(sparse, dense, interval)
    before = sparse.cache.stats().evictions
    times = time_in_turns(
        sparse, dense, periods=periods, steps=interval, turn=options.turn, label=label
    )
    evictions = sparse.cache.stats().evictions - before
    target = TARGETS.get(policy)
    ratio = spread(times.ratios())
    return {
        "model": name,
        "batch": batch,
        "policy": policy,
        "ratio": ratio,
        "target": target,
        "met": None if target is None else ratio["median"] <= target,
        "evictions_in_the_measured_steps": evictions,
        **_where_it_goes(times),
    }


def _warm_up(sparse: SparseDecoding, dense: DenseDecoding, interval: int) -> None:
    # A whole period, so that what follows starts right after an eviction again.
    for _ in range(interval):
        sparse.step()
        sparse.after()
    for _ in range(min(interval, 16)):
        dense.step()
        dense.after()


def _where_it_goes(times: PairedTimes) -> dict[str, float]:
    """Split the overhead into plain steps and evictions.

    The eviction lies at the same place in every period: the step whose least time over the
    periods is greatest. Its cost is what it takes beyond a plain step.
    """
    by_place = [min(place) for place in zip(*times.subject, strict=True)]
    evicting = by_place.index(max(by_place))
    plain = [t for period in times.subject for i, t in enumerate(period) if i != evicting]
    dense = statistics.median(t for period in times.rival for t in period)
    plain_step = statistics.median(plain)
    eviction = statistics.median(period[evicting] for period in times.subject) - plain_step
    return {
        "dense_step_ms": dense * 1e3,
        "plain_step_ms": plain_step * 1e3,
        "plain_step_ratio": plain_step / dense,
        "eviction_ms": eviction * 1e3,
        "eviction_share_of_a_period": eviction / (dense * len(times.subject[0])),
    }


def _speedup(model: Any, name: str, context: int, options: argparse.Namespace) -> dict[str, Any]:
    sparse = SparseDecoding(
        model,
        batch=1,
        budget=options.budget,
        interval=options.interval,
        policy="rkv",
        masked=options.mask,
    )
    dense = DenseDecoding(model, batch=1, tokens=context, constant=False, masked=options.mask)
    dense.step()
    dense.after()
    times = time_in_turns(
        sparse,
        dense,
        periods=max(2, options.periods - 2),
        steps=options.interval,
        turn=options.turn,
        rival_turn=max(1, options.turn // 8),
        label=f"{name}, {context} tokens dense",
    )
    return {
        "model": name,
        "policy": "rkv",
        "context": context,
        "speedup": spread([1 / ratio for ratio in times.ratios()]),
        "dense_step_ms": statistics.median(t for p in times.rival for t in p) * 1e3,
        "sparse_step_ms": statistics.fmean(t for p in times.subject for t in p) * 1e3,
    }


def _profile(model: Any, name: str, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Which of the library's functions the time of one period goes to.

    Shares are of the profiled time, which the profiler itself stretches where many small calls
    are made: read them as a hint where to look, not as a measure.
    """
    sparse = SparseDecoding(
        model,
        batch=1,
        budget=options.budget,
        interval=options.interval,
        policy=policy,
        masked=options.mask,
    )
    profiler = cProfile.Profile()
    for _ in range(options.interval):
        profiler.enable()
        sparse.step()
        profiler.disable()
        sparse.after()
    statistics_ = pstats.Stats(profiler)
    total = statistics_.total_tt
    library = str(Path(__import__("sparse_cache").__file__).parent)
    rows = []
    for (file, _, function), (_, calls, _, cumulative, _) in statistics_.stats.items():
        if file.startswith(library):
            where = f"{Path(file).relative_to(library)}:{function}"
            rows.append(
                {"function": where, "calls": calls, "share_with_callees": cumulative / total}
            )
    rows.sort(key=lambda row: -row["share_with_callees"])
    return {"model": name, "policy": policy, "functions": rows[:14]}


def _print(
    overhead: list[dict[str, Any]], speedup: list[dict[str, Any]], profiles: list[dict[str, Any]]
) -> None:
    print_table(
        "Decode step, sparse / dense at a constant budget + interval tokens",
        (
            "model",
            "batch",
            "policy",
            "ratio",
            "quartiles",
            "target",
            "met",
            "plain step",
            "eviction ms",
            "dense step ms",
        ),
        [
            (
                row["model"],
                row["batch"],
                row["policy"],
                row["ratio"]["median"],
                "{:.3f}-{:.3f}".format(*row["ratio"]["quartiles"]),
                row["target"],
                row["met"],
                row["plain_step_ratio"],
                row["eviction_ms"],
                row["dense_step_ms"],
            )
            for row in overhead
        ],
    )
    print_table(
        "Dense step / sparse step, batch 1",
        ("model", "dense context", "speed-up", "quartiles", "dense ms", "sparse ms"),
        [
            (
                row["model"],
                row["context"],
                row["speedup"]["median"],
                "{:.3f}-{:.3f}".format(*row["speedup"]["quartiles"]),
                row["dense_step_ms"],
                row["sparse_step_ms"],
            )
            for row in speedup
        ],
    )
    for profile in profiles:
        print_table(
            f"Where a period goes ({profile['model']}, {profile['policy']}, batch 1; profiled, "
            "so small calls look larger than they are)",
            ("function", "calls", "share with callees"),
            [(r["function"], r["calls"], r["share_with_callees"]) for r in profile["functions"]],
        )


if __name__ == "__main__":
    main()

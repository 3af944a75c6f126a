"""Long generations: memory must stay flat and stored tokens bounded.

Two runs through `model.generate`: many tokens on a tiny model, watching the resident memory of
the process; and thousands of tokens on the real model, watching the bytes of the tensors in which
the layers store keys and values.

    python -m benchmarks.soak
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from .environment import resident_bytes
from .models import cache_argument, open_model, token_bytes
from .reporting import common_options, parse, print_table, pyplot, save_picture, write_results

FLAT_SHARE = 0.02
"""Resident memory may grow by this share after the warm-up: allocators and interpreters drift."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run both soaks, print, write `soak.json`, and return what was written."""
    options = _options(arguments)
    runs = [_soak("tiny", options.tiny_tokens, options)]
    if not options.quick:
        runs.append(_soak(options.model, options.tokens, options))
    _print(runs)
    results = {"runs": runs}
    write_results("soak", options, results)
    _draw(runs, options)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Memory and stored tokens over long generations.")
    parser.add_argument("--tiny-tokens", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=4_000)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--policy", default="rkv")
    parser.add_argument("--samples", type=int, default=200, help="memory readings in a run")
    options = parse(parser, arguments)
    if options.quick:
        options.tiny_tokens, options.budget, options.interval = 320, 64, 16
    return options


def _soak(name: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    from sparse_cache import SparseBudgetCache

    model, tokenizer = open_model(name, options.seed)
    cache = SparseBudgetCache(
        budget=options.budget, interval=options.interval, policy=options.policy
    )
    prompt = torch.tensor([tokenizer.encode("A long story begins here.")])
    watch = _Watch(cache, tokens, options.samples, name)
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{cache_argument(model): cache},
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        temperature=1.0,
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    seconds = time.perf_counter() - start
    watch.close()
    limit = options.budget + options.interval
    # Warm: the first tenth of the run, and at least two evictions.
    warm = max(tokens // 10, limit + options.interval)
    late = [reading for reading in watch.readings if reading["tokens"] > warm]
    stored = [reading["kv_bytes"] for reading in late]
    resident = [reading["resident_bytes"] for reading in late]
    full = limit * token_bytes(model)
    tenth = max(1, len(resident) // 10)
    # Means over the first and the last tenth of the warm readings: single readings jitter.
    early_resident = statistics.fmean(resident[:tenth])
    late_resident = statistics.fmean(resident[-tenth:])
    growth = late_resident - early_resident
    return {
        "model": name,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "evictions": cache.stats().evictions,
        "resident_start": watch.at_start,
        "resident_warm": early_resident,
        "resident_end": late_resident,
        "resident_growth_after_warm_up": growth,
        "resident_flat": growth <= FLAT_SHARE * early_resident,
        "most_tokens_stored": max(reading["stored"] for reading in watch.readings),
        "limit_of_tokens_stored": limit,
        "bounded": all(reading["stored"] <= limit for reading in watch.readings),
        "kv_bytes": stored[-1],
        "kv_bytes_constant": len(set(stored)) == 1,
        "kv_bytes_over_full_layers": stored[-1] / full,
        "within_2_percent": abs(stored[-1] / full - 1) <= 0.02,
        "bookkeeping_bytes": watch.readings[-1]["other_bytes"],
        "dense_kv_bytes": (prompt.shape[1] + tokens) * token_bytes(model),
        "readings": watch.readings,
    }


class _Watch(StoppingCriteria):
    """Called by `generate` after every token; takes readings and never stops it."""

    def __init__(self, cache: Any, tokens: int, samples: int, label: str) -> None:
        self.cache = cache
        self.every = max(1, tokens // samples)
        self.count = 0
        self.readings: list[dict[str, int]] = []
        self.at_start = resident_bytes()
        self._progress = tqdm(total=tokens, desc=f"soak, {label}", leave=False)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count += 1
        if self.count % self.every == 0:
            kv, other = storage_bytes(self.cache)
            self.readings.append(
                {
                    "tokens": self.count,
                    "resident_bytes": resident_bytes(),
                    "stored": max(layer.keys.shape[2] for layer in self.cache.layers),
                    "kv_bytes": kv,
                    "other_bytes": other,
                }
            )
            self._progress.update(self.every)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def close(self) -> None:
        self._progress.close()


def storage_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of the storages behind keys and values, and of all other tensors a cache holds.

    Counted from outside, not asked of the cache: every tensor reachable from the cache object is
    found, and each underlying storage is counted once and in full, so that a small view of a
    large tensor counts as the large tensor.
    """
    owned = {}
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            if tensor is not None:
                owned[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    other = {}
    for tensor in _tensors(cache, set()):
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in owned:
            other[pointer] = tensor.untyped_storage().nbytes()
    return sum(owned.values()), sum(other.values())


def _tensors(thing: Any, visited: set[int]) -> Iterator[torch.Tensor]:
    if id(thing) in visited:
        return
    visited.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        parts = list(thing)
    elif type(thing).__module__.split(".")[0] in ("sparse_cache", "transformers"):
        names = getattr(type(thing), "__slots__", ())
        parts = [getattr(thing, name) for name in names if hasattr(thing, name)]
        parts += list(getattr(thing, "__dict__", {}).values())
    else:
        return
    for part in parts:
        yield from _tensors(part, visited)


def _print(runs: list[dict[str, Any]]) -> None:
    megabyte = 2**20
    print_table(
        "Memory over long generations",
        (
            "model",
            "tokens",
            "tokens/s",
            "resident MB start",
            "warm",
            "end",
            "flat",
            "stored (limit)",
            "KV bytes",
            "constant",
            "of full",
            "within 2 %",
        ),
        [
            (
                run["model"],
                run["tokens"],
                f"{run['tokens_per_second']:.1f}",
                f"{run['resident_start'] / megabyte:.1f}",
                f"{run['resident_warm'] / megabyte:.1f}",
                f"{run['resident_end'] / megabyte:.1f}",
                run["resident_flat"],
                f"{run['most_tokens_stored']} ({run['limit_of_tokens_stored']})",
                run["kv_bytes"],
                run["kv_bytes_constant"],
                run["kv_bytes_over_full_layers"],
                run["within_2_percent"],
            )
            for run in runs
        ],
    )


def _draw(runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(1, len(runs), figsize=(5.2 * len(runs), 3.4), squeeze=False)
    for axis, run in zip(axes[0], runs, strict=True):
        seen = [reading["tokens"] for reading in run["readings"]]
        dense_slope = run["dense_kv_bytes"] / run["tokens"]
        axis.plot(seen, [t * dense_slope / 2**20 for t in seen], label="dense KV", color="0.6")
        axis.plot(seen, [r["kv_bytes"] / 2**20 for r in run["readings"]], label="KV held")
        axis.set_xlabel("tokens decoded")
        axis.set_ylabel("MiB of keys and values")
        axis.set_title(f"{run['model']}, budget {options.budget}, interval {options.interval}")
        axis.legend(frameon=False)
    save_picture(figure, options.output / "soak.png")
    plt.close(figure)


if __name__ == "__main__":
    main()

"""Does it pay to divide a budget unevenly? Allocations of the same bytes, compared with dense.

As in `benchmarks.quality`, known text is fed to the model with the cache, and every prediction is
compared with that of one dense forward: KL(dense || cache). For each policy and budget, the
allocations hold the same bytes, so that the one with the smaller KL divides them better.

Layers of a pyramid fill up at different times, but once all of them have evicted, they do so every
`interval` tokens. The first chunk is therefore as long as the largest layer needs, for every
allocation, and from then on chunks of `interval` tokens give every query the very tokens that it
sees when they come one by one. The run begins by comparing the two ways on a short text.

    python -m benchmarks.allocation
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import allocation_document, texts
from .bootstrap import interval as bootstrap_interval
from .models import forward, open_model
from .quality import (
    Measured,
    dense_log_probabilities,
    kinds_of_text,
    mean_of,
    measure,
    segments_of,
)
from .reporting import RESULTS, common_options, parse, print_table, write_results

DOCS = Path(__file__).parent.parent / "docs"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pyramid, beta 2": ("pyramid", {"beta": 2}),
    "adaptive, floor 0.5": ("adaptive", {"floor": 0.5}),
}
"""Milder forms of the allocations, by the name they have in the tables."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `allocation.json` and the document, and return what was written."""
    options = _options(arguments)
    model, tokenizer = open_model(options.model, options.seed)
    allocations = _allocations(options)
    check = _check_chunks(model, tokenizer, allocations, options)
    rows: list[dict[str, Any]] = []
    for kind, tokens in kinds_of_text(model, tokenizer, options):
        rows += _measure(model, kind, tokens, allocations, options)
    _print(rows)
    results = {"chunks_against_single_tokens": check, "rows": rows}
    written = write_results("allocation", options, results)
    if options.docs is not None:
        print(f"wrote {allocation_document.write(written, options.docs)}")
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Allocations of one budget against the dense model on known text.")
    parser.add_argument("--budgets", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--policies", nargs="+", default=["snapkv", "h2o", "rkv"])
    parser.add_argument("--allocations", nargs="+", default=["uniform", "pyramid", "adaptive"])
    parser.add_argument("--variants", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="plain text files")
    parser.add_argument("--texts", type=int, default=3, help="how many texts")
    parser.add_argument("--text-tokens", type=int, default=1024, help="tokens in each")
    parser.add_argument("--chains", type=int, default=3, help="how many chains of thought")
    parser.add_argument("--chain-tokens", type=int, default=896, help="tokens in each")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the chains")
    parser.add_argument("--docs", type=Path, default=None, help="folder for the document")
    options = parse(parser, arguments)
    if options.quick:
        options.budgets, options.interval = [32], 16
        options.texts, options.text_tokens = 2, 128
        options.chains, options.chain_tokens = 1, 112
    elif options.docs is None and options.output == RESULTS:
        options.docs = DOCS
    shortest = min(options.text_tokens, options.chain_tokens)
    longest = 2 * max(options.budgets) + options.interval
    if longest >= shortest:
        parser.error(
            f"--budgets {max(options.budgets)} with --interval {options.interval} needs texts of "
            f"more than {longest} tokens, these have {shortest}; take longer texts or smaller "
            "budgets."
        )
    return options


def _allocations(options: argparse.Namespace) -> dict[str, Any]:
    """Allocators by the name they have in the tables."""
    from sparse_cache.allocators import allocator_class, resolve_allocator

    chosen = {name: resolve_allocator(name) for name in options.allocations}
    if options.variants:
        for name, (base, changes) in VARIANTS.items():
            if base in chosen:
                chosen[name] = allocator_class(base)(**changes)
    return chosen


def feed(
    model: Any,
    tokens: torch.Tensor,
    held: dict[str, Any],
    *,
    allocation: Any,
    policy: Any,
    budget: int,
    interval: int,
    first: int,
    chunk: int,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield `(start, end, logits)` of every chunk after the first `first` tokens.

    Args:
        model: what is measured.
        tokens: `[texts, T]`.
        held: is given what the cache holds at its end: bytes and how uneven that is.
        allocation, policy, budget, interval: of the cache.
        first: tokens of the first chunk, enough to make every layer evict.
        chunk: tokens of the others.

    Raises:
        RuntimeError: rows did not evict where the chunks end, so chunks would not be equivalent
            to single tokens.
    """
    from sparse_cache import SparseBudgetCache

    cache = SparseBudgetCache(
        budget=budget, interval=interval, policy=policy, allocation=allocation
    )
    forward(model, tokens[:, :first], cache, logits_to_keep=1)
    for start in range(first, tokens.shape[1], chunk):
        if (start - first) % interval == 0:
            stored = [layer.lengths for layer in cache.layers]
            budgets = [layer.settings.budget for layer in cache.layers]
            if any(set(row) != {own} for row, own in zip(stored, budgets, strict=True)):
                raise RuntimeError(
                    f"after {start} tokens layers hold {stored}, not their budgets of {budgets}: "
                    "rows do not evict where chunks end."
                )
        end = min(start + chunk, tokens.shape[1])
        yield start, end, forward(model, tokens[:, start:end], cache)
    counts = [
        count
        for layer in cache.layers
        for row in getattr(layer, "lengths_by_head", [layer.lengths])
        for count in row
    ]
    stats = cache.stats()
    held |= {
        "bytes": stats.bytes_held,
        "bytes_bookkeeping": stats.bytes_bookkeeping,
        "fewest_tokens_of_a_head": min(counts),
        "most_tokens_of_a_head": max(counts),
    }


def _first(model: Any, allocations: dict[str, Any], budget: int, interval: int) -> int:
    """Tokens after which every layer of every allocation has evicted."""
    from sparse_cache import SparseBudgetCache

    config = model.config.get_text_config()
    largest = [
        max(
            layer.settings.budget
            for layer in SparseBudgetCache(budget, allocation=each, config=config).layers
        )
        for each in allocations.values()
    ]
    return max(largest) + interval


@torch.no_grad()
def _measure(
    model: Any,
    kind: str,
    tokens: torch.Tensor,
    allocations: dict[str, Any],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    dense = dense_log_probabilities(model, tokens)
    cells = [(budget, policy) for budget in options.budgets for policy in options.policies]
    rows: list[dict[str, Any]] = []
    with tqdm([(*cell, name) for cell in cells for name in allocations], desc=kind) as progress:
        measured: dict[tuple[int, str], dict[str, Measured]] = {}
        holds: dict[tuple[int, str, str], dict[str, Any]] = {}
        for budget, policy, name in progress:
            progress.set_postfix_str(f"budget {budget}, {policy}, {name}")
            held: dict[str, Any] = {}
            chunks = feed(
                model,
                tokens,
                held,
                allocation=allocations[name],
                policy=policy,
                budget=budget,
                interval=options.interval,
                first=_first(model, allocations, budget, options.interval),
                chunk=options.interval,
            )
            measured.setdefault((budget, policy), {})[name] = measure(tokens, dense, chunks)
            holds[budget, policy, name] = held
    for (budget, policy), figures in measured.items():
        for name in figures:
            found = _summarise(figures, name)
            found |= {
                "kind": kind,
                "budget": budget,
                "policy": policy,
                "name": name,
                "allocation": type(allocations[name]).name,
                "options": allocations[name].options(),
                **holds[budget, policy, name],
            }
            rows.append(found)
    return rows


def _summarise(figures: dict[str, Measured], name: str) -> dict[str, Any]:
    divergence = segments_of(figures[name].divergence)
    agreement = segments_of(figures[name].agreement)
    row = {
        "tokens": int(divergence[1].sum()),
        "kl": mean_of(divergence),
        "kl_interval": bootstrap_interval(*divergence),
        "agreement": mean_of(agreement),
        "minus_uniform": None,
    }
    if name != "uniform" and "uniform" in figures:
        theirs, counts = segments_of(figures["uniform"].divergence)
        difference = divergence[0] - theirs
        row["minus_uniform"] = {
            "kl": float(difference.sum() / counts.sum()),
            "interval": bootstrap_interval(difference, counts),
        }
    return row


@torch.no_grad()
def _check_chunks(
    model: Any, tokenizer: Any, allocations: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Greatest difference of log-probabilities between chunks and single tokens, short text."""
    budget, interval = 32, 16
    first = _first(model, allocations, budget, interval)
    length = first + 3 * interval
    tokens = torch.tensor(texts.corpus(tokenizer, length, 1, options.text))
    worst: dict[str, float] = {}
    for name, allocation in allocations.items():
        for policy in options.policies[:2]:
            ways = []
            for chunk in (interval, 1):
                chunks = feed(
                    model,
                    tokens,
                    {},
                    allocation=allocation,
                    policy=policy,
                    budget=budget,
                    interval=interval,
                    first=first,
                    chunk=chunk,
                )
                ways.append(torch.cat([logits for _, _, logits in chunks], dim=1))
            one, two = (way.float().log_softmax(-1) for way in ways)
            worst[f"{name}, {policy}"] = float((one - two).abs().max())
    return {"tokens": length, "budget": budget, "interval": interval, "greatest_difference": worst}


def _print(rows: list[dict[str, Any]]) -> None:
    for kind, budget in dict.fromkeys((row["kind"], row["budget"]) for row in rows):
        chosen = [row for row in rows if (row["kind"], row["budget"]) == (kind, budget)]
        print_table(
            f"{kind}, budget {budget}, {chosen[0]['tokens']} tokens",
            allocation_document.HEADER,
            [allocation_document.cells(row) for row in chosen],
        )


if __name__ == "__main__":
    main()

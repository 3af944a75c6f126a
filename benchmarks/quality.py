"""How far the budgeted cache moves a model's predictions, for every policy.

Known text is fed to the model with the cache, and at every token the prediction is compared with
that of one dense forward over the same text: KL(dense || sparse), how often both name the same most
likely token, and the perplexity of the text. Only tokens after the first eviction count; before
it both are the same.

Text is fed in chunks that end exactly where rows evict: first `budget + interval` tokens, then
`interval` at a time. No eviction falls inside a chunk, so every query sees the very tokens that it
sees when they come one by one. `--chunk 1` feeds them one by one, and takes long; the run starts
by comparing the two ways on a short text.

    python -m benchmarks.quality --budgets 128 --policies rkv streaming
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from . import texts
from .bootstrap import interval as bootstrap_interval
from .models import forward, open_model
from .reporting import common_options, parse, print_table, write_results

SEGMENT = 64
"""Tokens in a segment of the bootstrap."""
RKV_VARIANTS: dict[str, dict[str, Any]] = {
    "rkv weight 0.1 max group, max pool": {"group_reduction": "max", "pooling": "max"},
    "rkv weight 0.5": {"importance_weight": 0.5},
    "rkv weight 0.9": {"importance_weight": 0.9},
    "rkv weight 0.5, max group": {"importance_weight": 0.5, "group_reduction": "max"},
    "rkv weight 0.5, max pool": {"importance_weight": 0.5, "pooling": "max"},
    "rkv weight 0.5, no pooling": {"importance_weight": 0.5, "kernel_size": 1},
    "rkv weight 0.9, no pooling": {"importance_weight": 0.9, "kernel_size": 1},
}
"""Options of R-KV that are compared, by the name they have in the tables."""


@dataclass
class Measured:
    """Per token of a kind of text, `[texts, T]`; before the first eviction NaN."""

    divergence: torch.Tensor
    agreement: torch.Tensor
    surprise: torch.Tensor
    dense_surprise: torch.Tensor


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `quality.json`, and return what was written."""
    options = _options(arguments)
    model, tokenizer = open_model(options.model, options.seed)
    check = _check_chunks(model, tokenizer, options)
    candidates = _candidates(options)
    rows: list[dict[str, Any]] = []
    for kind, tokens in kinds_of_text(model, tokenizer, options):
        measured = _measure(model, kind, tokens, candidates, options)
        for budget in options.budgets:
            rows += _summarise(kind, budget, candidates, measured[budget])
    _print(rows)
    results = {"chunks_against_single_tokens": check, "rows": rows}
    write_results("quality", options, results)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Quality of every policy against the dense model on known text.")
    parser.add_argument("--budgets", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--policies", nargs="+", default=["all"])
    parser.add_argument("--variants", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="plain text files")
    parser.add_argument("--texts", type=int, default=4, help="how many texts")
    parser.add_argument("--text-tokens", type=int, default=1024, help="tokens in each")
    parser.add_argument("--chains", type=int, default=4, help="how many chains of thought")
    parser.add_argument("--chain-tokens", type=int, default=768, help="tokens in each")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the chains")
    parser.add_argument("--chunk", type=int, default=None, help="tokens fed at a time")
    options = parse(parser, arguments)
    if options.quick:
        options.budgets, options.interval = [32], 16
        options.texts, options.text_tokens = 2, 128
        options.chains, options.chain_tokens = 2, 96
    shortest = min(options.text_tokens, options.chain_tokens)
    if max(options.budgets) + options.interval >= shortest:
        parser.error(
            f"--budgets {max(options.budgets)} with --interval {options.interval} evicts nothing "
            f"in texts of {shortest} tokens; take longer texts or smaller budgets."
        )
    if options.chunk is not None and options.interval % options.chunk:
        parser.error(f"--chunk {options.chunk} must divide --interval {options.interval}.")
    return options


def _candidates(options: argparse.Namespace) -> dict[str, Any]:
    """Policies by the name they have in the tables."""
    from sparse_cache.policies import policy_names, resolve_policy

    names = policy_names() if options.policies == ["all"] else options.policies
    chosen = {name: resolve_policy(name) for name in names}
    if options.variants and "rkv" in chosen:
        published = dataclasses.replace(
            chosen["rkv"],
            importance_weight=0.1,
            pooling="avg",
            group_reduction="mean",
            kernel_size=7,
        )
        if published != chosen["rkv"]:
            chosen["rkv weight 0.1"] = published
        for name, changes in list(RKV_VARIANTS.items())[: 2 if options.quick else None]:
            variant = dataclasses.replace(published, **changes)
            if variant != chosen["rkv"]:
                chosen[name] = variant
    return chosen


def kinds_of_text(
    model: Any, tokenizer: Any, options: argparse.Namespace
) -> Iterator[tuple[str, torch.Tensor]]:
    """Kinds of text, each `[texts, T]`."""
    texts.warn_of_unused(options.text)
    if options.texts:
        pieces = texts.corpus(tokenizer, options.text_tokens, options.texts, options.text)
        yield "text", torch.tensor(pieces)
    if options.chains:
        chains = texts.chains(
            model,
            tokenizer,
            options.chain_tokens,
            options.chains,
            options.temperature,
            options.seed,
        )
        yield "chains", torch.tensor(chains)


def _measure(
    model: Any,
    kind: str,
    tokens: torch.Tensor,
    candidates: dict[str, Any],
    options: argparse.Namespace,
) -> dict[int, dict[str, Measured]]:
    dense = dense_log_probabilities(model, tokens)
    measured: dict[int, dict[str, Measured]] = {}
    runs = [(budget, name) for budget in options.budgets for name in candidates]
    with tqdm(runs, desc=kind, leave=False) as progress:
        for budget, name in progress:
            progress.set_postfix_str(f"budget {budget}, {name}")
            measured.setdefault(budget, {})[name] = compare(
                model,
                tokens,
                dense,
                policy=candidates[name],
                budget=budget,
                interval=options.interval,
                chunk=options.chunk or options.interval,
            )
    return measured


@torch.no_grad()
def dense_log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[texts, T, V]` float32, one dense forward for each text."""
    rows = [forward(model, row[None], None, use_cache=False).float() for row in tokens]
    return torch.cat([row.log_softmax(-1) for row in rows])


@torch.no_grad()
def compare(
    model: Any,
    tokens: torch.Tensor,
    dense: torch.Tensor,
    *,
    policy: Any,
    budget: int,
    interval: int,
    chunk: int,
) -> Measured:
    """Feed `tokens` `[texts, T]` through a budgeted cache and compare with `dense` `[texts, T, V]`.

    See `measure`.
    """
    return measure(tokens, dense, feed(model, tokens, policy, budget, interval, chunk))


def measure(
    tokens: torch.Tensor,
    dense: torch.Tensor,
    chunks: Iterable[tuple[int, int, torch.Tensor]],
) -> Measured:
    """Compare `(start, end, logits)` of chunks of `tokens` with the `dense` log-probabilities.

    The figure at place t belongs to the prediction of token t + 1 by token t.
    """
    shape = tokens.shape
    result = Measured(*(torch.full(shape, torch.nan) for _ in range(4)))
    for start, end, logits in chunks:
        reference = dense[:, start:end]
        sparse = logits.float().log_softmax(-1)
        # Log-probabilities of impossible tokens are -inf in neither: logits are finite.
        result.divergence[:, start:end] = (reference.exp() * (reference - sparse)).sum(-1)
        same = reference.argmax(-1) == sparse.argmax(-1)
        result.agreement[:, start:end] = same.float()
        known = min(end, shape[1] - 1)
        following = tokens[:, start + 1 : known + 1, None]
        for target, source in ((result.surprise, sparse), (result.dense_surprise, reference)):
            picked = source[:, : known - start].gather(-1, following)[..., 0]
            target[:, start:known] = -picked
    return result


def feed(
    model: Any, tokens: torch.Tensor, policy: Any, budget: int, interval: int, chunk: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield `(start, end, logits)` of every chunk after the first eviction.

    Raises:
        RuntimeError: rows did not evict where the chunks end, so chunks would not be equivalent
            to single tokens.
    """
    from sparse_cache import SparseBudgetCache

    cache = SparseBudgetCache(budget=budget, interval=interval, policy=policy)
    first = budget + interval
    forward(model, tokens[:, :first], cache, logits_to_keep=1)
    for start in range(first, tokens.shape[1], chunk):
        if (start - first) % interval == 0 and cache.stats().tokens_kept != budget:
            raise RuntimeError(
                f"after {start} tokens the cache holds {cache.stats().tokens_kept} tokens, not its "
                f"budget of {budget}: rows do not evict where chunks end."
            )
        end = min(start + chunk, tokens.shape[1])
        yield start, end, forward(model, tokens[:, start:end], cache)


@torch.no_grad()
def _check_chunks(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Greatest difference of log-probabilities between chunks and single tokens, short text."""
    budget, interval = 32, 16
    length = budget + 4 * interval
    tokens = torch.tensor(texts.corpus(tokenizer, length, 1, options.text))
    worst = {}
    for policy in ("rkv", "h2o", "streaming"):
        ways = []
        for chunk in (interval, 1):
            chunks = [lp for _, _, lp in feed(model, tokens, policy, budget, interval, chunk)]
            ways.append(torch.cat(chunks, dim=1).float().log_softmax(-1))
        worst[policy] = float((ways[0] - ways[1]).abs().max())
    return {"tokens": length, "budget": budget, "interval": interval, "greatest_difference": worst}


def _summarise(
    kind: str, budget: int, candidates: dict[str, Any], measured: dict[str, Measured]
) -> list[dict[str, Any]]:
    rows = []
    for name, figures in measured.items():
        divergence = segments_of(figures.divergence)
        agreement = segments_of(figures.agreement)
        surprise = segments_of(figures.surprise)
        dense_surprise = segments_of(figures.dense_surprise)
        against = {}
        for other in ("streaming", "rkv"):
            if other in measured and other != name:
                theirs, counts = segments_of(measured[other].divergence)
                difference = divergence[0] - theirs
                against[other] = {
                    "kl_difference": float(difference.sum() / counts.sum()),
                    "interval": bootstrap_interval(difference, counts),
                }
        rows.append(
            {
                "kind": kind,
                "budget": budget,
                "name": name,
                "policy": type(candidates[name]).name,
                "options": candidates[name].options(),
                "tokens": int(divergence[1].sum()),
                "kl": mean_of(divergence),
                "kl_interval": bootstrap_interval(*divergence),
                "kl_per_text": (divergence[0].sum(1) / divergence[1].sum(1)).tolist(),
                "agreement": mean_of(agreement),
                "agreement_interval": bootstrap_interval(*agreement),
                "perplexity": float(torch.tensor(mean_of(surprise)).exp()),
                "dense_perplexity": float(torch.tensor(mean_of(dense_surprise)).exp()),
                "against": against,
            }
        )
    return rows


def segments_of(figures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and counts `[texts, segments]` of the tokens that have a figure."""
    measured = figures[:, ~figures.isnan().all(0)].double()
    missing = -measured.shape[1] % SEGMENT
    padded = torch.nn.functional.pad(measured, (0, missing), value=torch.nan)
    pieces = padded.unflatten(1, (-1, SEGMENT))
    return pieces.nansum(-1), (~pieces.isnan()).double().sum(-1)


def mean_of(segments: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float(segments[0].sum() / segments[1].sum())


def _print(rows: list[dict[str, Any]]) -> None:
    groups = dict.fromkeys((row["kind"], row["budget"]) for row in rows)
    for kind, budget in groups:
        chosen = [row for row in rows if (row["kind"], row["budget"]) == (kind, budget)]
        chosen.sort(key=lambda row: row["kl"])
        print_table(
            f"{kind}, budget {budget}, {chosen[0]['tokens']} tokens; perplexity of the dense "
            f"model {chosen[0]['dense_perplexity']:.3f}",
            ("policy", "KL", "95 % interval", "same top token", "perplexity", "KL - streaming's"),
            [
                (
                    row["name"],
                    row["kl"],
                    "{:.3f}-{:.3f}".format(*row["kl_interval"]),
                    row["agreement"],
                    row["perplexity"],
                    difference(row, "streaming"),
                )
                for row in chosen
            ],
        )


def difference(row: dict[str, Any], other: str) -> str | None:
    """The difference in KL to another policy with its interval, as text; None for itself."""
    if other not in row["against"]:
        return None
    entry = row["against"][other]
    low, high = entry["interval"]
    return f"{entry['kl_difference']:+.3f} ({low:+.3f} to {high:+.3f})"


if __name__ == "__main__":
    main()

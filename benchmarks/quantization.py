"""What does storing keys and values in 8 bits cost, and what does it buy at the same bytes?

As in `benchmarks.quality`, known text is fed to the model with the cache, and every prediction is
compared with that of one dense forward: KL(dense || cache). Each policy and budget is measured
three times: stored as the model computes, in int8 with the same budget, and in int8 with the larger
budget whose tokens take the bytes of the first.

Chunks end where rows evict. A query of a chunk sees the other tokens of its chunk as they come, but
those of a decoding step as they are stored, so here all tokens behind the first chunk, which is the
prompt, are rounded before the cache takes them in; rounding once more does not change them. The run
begins by comparing chunks with single tokens on a short text.

    python -m benchmarks.quantization
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from sparse_cache import SparseBudgetCache
from sparse_cache.quantization import dequantize, quantize

from . import quantization_document, texts
from .bootstrap import interval as bootstrap_interval
from .models import forward, open_model, token_bytes
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


class Storage(NamedTuple):
    """One way to use the bytes of a budget."""

    name: str
    quantization: str | None
    budget: int


class RoundedChunks(SparseBudgetCache):
    """Hands out the tokens of a chunk as they are stored, as in steps of one token each."""

    rounds = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SparseBudgetCache.update`."""
        if self.rounds and self.settings.quantization is not None:
            key_states = dequantize(*quantize(key_states), key_states.dtype)
            value_states = dequantize(*quantize(value_states), value_states.dtype)
        return super().update(key_states, value_states, *args, **kwargs)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `quantization.json` and the document, and return what was written."""
    options = _options(arguments)
    model, tokenizer = open_model(options.model, options.seed)
    check = check_chunks(model, tokenizer, options)
    rows: list[dict[str, Any]] = []
    for kind, tokens in kinds_of_text(model, tokenizer, options):
        rows += _measure(model, kind, tokens, options)
    _print(rows)
    results = {"chunks_against_single_tokens": check, "rows": rows}
    written = write_results("quantization", options, results)
    if options.docs is not None:
        print(f"wrote {quantization_document.write(written, options.docs)}")
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Keys and values in int8 against the dense model on known text.")
    parser.add_argument("--budgets", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--policies", nargs="+", default=["rkv", "h2o", "streaming"])
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="plain text files")
    parser.add_argument("--texts", type=int, default=3, help="how many texts")
    parser.add_argument("--text-tokens", type=int, default=1664, help="tokens in each")
    parser.add_argument("--chains", type=int, default=0, help="how many chains of thought")
    parser.add_argument("--chain-tokens", type=int, default=1664, help="tokens in each")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the chains")
    parser.add_argument("--docs", type=Path, default=None, help="folder for the document")
    options = parse(parser, arguments)
    if options.quick:
        options.budgets, options.interval = [32], 16
        options.texts, options.text_tokens = 2, 224
        options.chains, options.chain_tokens = 1, 208
    elif options.docs is None and options.output == RESULTS:
        options.docs = DOCS
    used = [options.text_tokens] * bool(options.texts) + [options.chain_tokens] * bool(
        options.chains
    )
    first = max(options.budgets) + options.interval
    if not used or first >= min(used):
        parser.error(
            f"--budgets {max(options.budgets)} with --interval {options.interval} needs texts of "
            f"more than {first} tokens; take longer texts or smaller budgets."
        )
    return options


def storages(model: Any, budget: int, interval: int) -> list[Storage]:
    """Ways to store, the last two of which are to be compared with the first."""
    config = model.config.get_text_config()
    as_computed = token_bytes(model)
    numbers = as_computed // (torch.finfo(model.dtype).bits // 8)
    scales = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads
    slots = (budget + interval) * as_computed // (numbers + scales)
    dtype = str(model.dtype).removeprefix("torch.")
    return [
        Storage(dtype, None, budget),
        Storage("int8, same budget", "int8", budget),
        Storage("int8, same bytes", "int8", slots - interval),
    ]


def feed(
    model: Any,
    tokens: torch.Tensor,
    held: dict[str, Any],
    *,
    storage: Storage,
    policy: str,
    interval: int,
    first: int,
    chunk: int,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield `(start, end, logits)` of every chunk after the first `first` tokens.

    Args:
        model: what is measured.
        tokens: `[texts, T]`.
        held: is given what the cache holds at its end.
        storage, policy, interval: of the cache.
        first: tokens of the first chunk, at most those that make the cache evict.
        chunk: most tokens of the others, which also end where rows evict.

    Raises:
        RuntimeError: rows did not evict where they should have.
    """
    cache = RoundedChunks(
        budget=storage.budget,
        interval=interval,
        policy=policy,
        quantization=storage.quantization,
    )
    forward(model, tokens[:, :first], cache, logits_to_keep=1)
    cache.rounds = True
    full, start = storage.budget + interval, first
    while True:
        if start == full:
            full += interval
            if cache.stats().tokens_kept != storage.budget:
                raise RuntimeError(
                    f"after {start} tokens the cache holds {cache.stats().tokens_kept} tokens, not "
                    f"its budget of {storage.budget}: rows do not evict where chunks end."
                )
        if start == tokens.shape[1]:
            break
        end = min(start + chunk, full, tokens.shape[1])
        yield start, end, forward(model, tokens[:, start:end], cache)
        start = end
    stats = cache.stats()
    held |= {
        "bytes": stats.bytes_held,
        "bytes_dense": stats.bytes_dense,
        "evictions_per_row": stats.evictions // (stats.budgeted_layers * tokens.shape[0]),
    }


@torch.no_grad()
def _measure(
    model: Any, kind: str, tokens: torch.Tensor, options: argparse.Namespace
) -> list[dict[str, Any]]:
    dense = dense_log_probabilities(model, tokens)
    runs = [
        (budget, policy, storage)
        for budget in options.budgets
        for policy in options.policies
        for storage in storages(model, budget, options.interval)
    ]
    rows: list[dict[str, Any]] = []
    base: Measured | None = None
    with tqdm(runs, desc=kind) as progress:
        for budget, policy, storage in progress:
            progress.set_postfix_str(f"budget {budget}, {policy}, {storage.name}")
            held: dict[str, Any] = {}
            chunks = feed(
                model,
                tokens,
                held,
                storage=storage,
                policy=policy,
                interval=options.interval,
                first=budget + options.interval,
                chunk=options.interval,
            )
            measured = measure(tokens, dense, chunks)
            if storage.quantization is None:
                base = measured
            rows.append(
                {
                    "kind": kind,
                    "policy": policy,
                    "base_budget": budget,
                    "storage": storage.name,
                    "quantization": storage.quantization,
                    "budget": storage.budget,
                    **held,
                    **_summarise(measured, None if measured is base else base),
                }
            )
    return rows


def _summarise(measured: Measured, base: Measured | None) -> dict[str, Any]:
    divergence = segments_of(measured.divergence)
    agreement = segments_of(measured.agreement)
    row: dict[str, Any] = {
        "tokens": int(divergence[1].sum()),
        "kl": mean_of(divergence),
        "kl_interval": bootstrap_interval(*divergence),
        "agreement": mean_of(agreement),
        "agreement_interval": bootstrap_interval(*agreement),
        "minus_base": None,
    }
    if base is not None:
        theirs, counts = segments_of(base.divergence)
        difference = divergence[0] - theirs
        row["minus_base"] = {
            "kl": float(difference.sum() / counts.sum()),
            "interval": bootstrap_interval(difference, counts),
        }
    return row


@torch.no_grad()
def check_chunks(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Compare chunks with single tokens on a short text, by the figures that are reported.

    They do not agree to the last bits: where one way of computing gives a number that lies near the
    middle between two levels, the other may round it to the other level, and deeper layers go on
    from there.
    """
    budget, interval = 32, 16
    length = budget + 4 * interval
    tokens = torch.tensor(texts.corpus(tokenizer, length, 1, options.text))
    dense = dense_log_probabilities(model, tokens)
    found: dict[str, Any] = {}
    for policy in options.policies:
        ways, kl = [], []
        for chunk in (interval, 1):
            chunks = list(
                feed(
                    model,
                    tokens,
                    {},
                    storage=Storage("int8", "int8", budget),
                    policy=policy,
                    interval=interval,
                    first=budget + interval,
                    chunk=chunk,
                )
            )
            kl.append(mean_of(segments_of(measure(tokens, dense, chunks).divergence)))
            logits = torch.cat([logits for _, _, logits in chunks], dim=1)
            ways.append(logits.float().log_softmax(-1))
        found[policy] = {
            "greatest_difference": float((ways[0] - ways[1]).abs().max()),
            "kl_of_chunks": kl[0],
            "kl_of_single_tokens": kl[1],
            "kl_between": float((ways[1].exp() * (ways[1] - ways[0])).sum(-1).mean()),
        }
    return {"tokens": length, "budget": budget, "interval": interval, "policies": found}


def _print(rows: list[dict[str, Any]]) -> None:
    for kind, budget in dict.fromkeys((row["kind"], row["base_budget"]) for row in rows):
        chosen = [row for row in rows if (row["kind"], row["base_budget"]) == (kind, budget)]
        print_table(
            f"{kind}, the bytes of budget {budget}, {chosen[0]['tokens']} tokens",
            quantization_document.HEADER,
            [quantization_document.cells(row) for row in chosen],
        )


if __name__ == "__main__":
    main()

"""How exactly a replayed forward gives back the rollout, and what recording it costs.

Exactness: tokens are sampled under a small budget by `generate`, in a left-padded batch; then one
forward of the whole sequences under the recorded trace computes their log-probabilities again, and
an ordinary dense forward does too. Rows that are in the file already are not measured again.

Recording: the bytes of a trace, and decoding steps with `record=True` against steps without, in
turns in one process.

    python -m benchmarks.replay --model embedded
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sparse_cache import EvictionTrace, SparseBudgetCache, policy_names
from sparse_cache.replay import replay

from .models import cache_argument, open_model, token_bytes
from .pairing import spread, time_in_turns
from .reporting import common_options, parse, print_table, write_results
from .runs import SparseDecoding
from .texts import corpus

PROMPTS = (160, 96, 48)
"""Tokens of the three rows."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `replay.json` after every row, and return what was written."""
    options = _options(arguments)
    model, tokenizer = open_model(options.model, options.seed)
    results: dict[str, Any] = {"exactness": _rows_so_far(options), "bytes": [], "overhead": []}
    wanted = _cases(options)
    done = {_identity(row) for row in results["exactness"]}
    with tqdm([case for case in wanted if _identity(case) not in done]) as progress:
        for case in progress:
            progress.set_postfix_str(f"{case['policy']} {case['attention']} {case['dtype']}")
            results["exactness"].append(_exactness(model, tokenizer, case, options))
            write_results("replay", options, results)
    results["bytes"], results["overhead"] = _bytes(model, options), _overhead(model, options)
    write_results("replay", options, results)
    _print(results)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Exactness of replay, and the cost of recording.")
    parser.add_argument("--policies", nargs="+", default=None, help="default: all")
    parser.add_argument("--tokens", type=int, default=400, help="sampled by row")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--periods", type=int, default=9, help="ratios for the recording overhead")
    parser.add_argument("--fresh", action="store_true", help="measure all rows anew")
    options = parse(parser, arguments)
    if options.quick:
        options.tokens, options.budget, options.interval = 40, 32, 8
        options.policies, options.periods, options.fresh = ["rkv", "streaming"], 2, True
    options.policies = options.policies or policy_names()
    return options


def _cases(options: argparse.Namespace) -> list[dict[str, Any]]:
    plain = {"allocation": "uniform", "prefill_chunk": None, "dtype": "float32"}
    cases = []
    for attention in ("sdpa", "eager"):
        cases += [plain | {"policy": each, "attention": attention} for each in options.policies]
        more = [
            {"allocation": "pyramid"},
            {"allocation": "adaptive"},
            {"prefill_chunk": 40},
        ]
        cases += [plain | {"policy": "rkv", "attention": attention} | each for each in more]
    if "window" in options.policies:
        # Without its first tokens the model amplifies rounding; this tells it from a fault.
        cases.append(plain | {"policy": "window", "attention": "sdpa", "dtype": "float64"})
    half = [name for name in ("rkv", "h2o", "streaming") if name in options.policies]
    cases += [plain | {"policy": each, "attention": "sdpa", "dtype": "bfloat16"} for each in half]
    return cases


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("policy", "attention", "allocation", "prefill_chunk", "dtype")
    return tuple(row[name] for name in names)


def _rows_so_far(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows in the file that were measured with the same settings."""
    path = options.output / "replay.json"
    if options.fresh or not path.is_file():
        return []
    content = json.loads(path.read_text())
    same = all(
        content["settings"].get(name) == getattr(options, name)
        for name in ("model", "tokens", "budget", "interval", "seed")
    )
    return content["exactness"] if same else []


def _exactness(
    model: Any, tokenizer: Any, case: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    model.set_attn_implementation(case["attention"])
    model.to(getattr(torch, case["dtype"]))
    ids, mask = _prompts(tokenizer)
    cache = SparseBudgetCache(
        options.budget,
        policy=case["policy"],
        allocation=case["allocation"],
        interval=options.interval,
        record=True,
    )
    torch.manual_seed(options.seed)
    chunk = {} if case["prefill_chunk"] is None else {"prefill_chunk_size": case["prefill_chunk"]}
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=options.tokens,
        min_new_tokens=options.tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **{cache_argument(model): cache},
        **chunk,
    )
    whole = torch.cat([mask, mask.new_ones(len(mask), options.tokens)], dim=1)
    tokens = output.sequences[:, -options.tokens :]
    sampled = _likelihood(torch.stack(output.logits, dim=1), tokens)
    given = {"attention_mask": whole, "logits_to_keep": options.tokens + 1}
    with torch.no_grad():
        with replay(model, cache.trace()):
            shadow = model(output.sequences, **given).logits[:, :-1]
        dense = model(output.sequences, **given).logits[:, :-1]
    replayed = (_likelihood(shadow, tokens) - sampled).abs()
    recomputed = (_likelihood(dense, tokens) - sampled).abs()
    model.float()
    return case | {
        "evictions": cache.stats().evictions,
        "replay_max": float(replayed.max()),
        "replay_mean": float(replayed.mean()),
        "dense_max": float(recomputed.max()),
        "dense_mean": float(recomputed.mean()),
    }


def _prompts(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(PROMPTS)
    texts = corpus(tokenizer, width, len(PROMPTS), [])
    ids = torch.zeros(len(PROMPTS), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(PROMPTS):
        ids[row, width - length :] = torch.tensor(texts[row][:length])
        mask[row, width - length :] = 1
    return ids, mask


def _likelihood(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[B, N]`, at least in float32, row by row to save memory."""
    rows = [
        each.to(torch.promote_types(each.dtype, torch.float32))
        .log_softmax(-1)
        .gather(-1, token[:, None])[:, 0]
        for each, token in zip(logits, tokens, strict=True)
    ]
    return torch.stack(rows)


def _bytes(model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes of a trace beside those of the keys and values of a dense cache."""
    ids = torch.randint(model.config.get_text_config().vocab_size, (2, 600))
    cache = SparseBudgetCache(options.budget, interval=options.interval, record=True)
    with torch.no_grad():
        model(ids, logits_to_keep=1, **{cache_argument(model): cache})
    trace = cache.trace()
    dense = ids.numel() * token_bytes(model)
    held = sum(death.nbytes for death in trace.deaths)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.safetensors"
        trace.save(path)
        loaded = EvictionTrace.load(path)
        stored = path.stat().st_size
    same = all(torch.equal(a, b) for a, b in zip(loaded.deaths, trace.deaths, strict=True))
    return [
        {
            "tokens": ids.numel(),
            "dense_kv_bytes": dense,
            "trace_bytes": held,
            "share": held / dense,
            "file_bytes": stored,
            "file_share": stored / dense,
            "file_is_equal": same,
        }
    ]


def _overhead(model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of a cache that records over those of one that does not, evictions included."""
    found = []
    for policy in ("rkv", "streaming"):
        sides = [
            SparseDecoding(
                model,
                batch=1,
                budget=512 if not options.quick else options.budget,
                interval=options.interval,
                policy=policy,
                masked=True,
                record=record,
            )
            for record in (True, False)
        ]
        for side in sides:
            for _ in range(options.interval):
                side.step()
                side.after()
        times = time_in_turns(
            *sides,
            periods=options.periods,
            steps=options.interval,
            turn=options.interval // 4,
            label=f"recording, {policy}",
        )
        found.append({"policy": policy, "batch": 1, "ratio": spread(times.ratios())})
    return found


def _print(results: dict[str, Any]) -> None:
    print_table(
        "Sampled tokens' log-probabilities: greatest difference from the sampler's (nats)",
        ("policy", "attention", "allocation", "chunk", "dtype", "replay", "dense", "dense mean"),
        [
            (
                *(row[name] for name in ("policy", "attention", "allocation", "prefill_chunk")),
                row["dtype"],
                f"{row['replay_max']:.1e}",
                row["dense_max"],
                row["dense_mean"],
            )
            for row in results["exactness"]
        ],
    )
    print_table(
        "Bytes of a trace over those of a dense cache",
        ("tokens", "in memory", "in a file"),
        [(str(row["tokens"]), row["share"], row["file_share"]) for row in results["bytes"]],
    )
    print_table(
        "Decode step, recording / not recording",
        ("policy", "ratio", "quartiles"),
        [
            (
                row["policy"],
                row["ratio"]["median"],
                "{:.3f}-{:.3f}".format(*row["ratio"]["quartiles"]),
            )
            for row in results["overhead"]
        ],
    )


if __name__ == "__main__":
    main()

"""Which model types run with `static=True`, `allocation=`, `quantization=` and under replay.

    python -m tests.architectures.modes                      all types, writes docs/modes.*
    python -m tests.architectures.modes --types llama,jamba  some types, prints only

A refusal by `UnsupportedModelError` is an answer; any other error, or a wrong number, is a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, StaticCache

from sparse_cache import SparseBudgetCache, UnsupportedModelError
from sparse_cache.replay import replay
from sparse_cache.replay.sites import attention_sites

from .build import build_tiny, causal_lm_types
from .checks import NO_CACHE, NOT_BUILT, REFUSED, Run, generate

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = {"budget": 12, "interval": 4, "window": 3, "sinks": 2, "policy": "keydiff"}
"""Overflows in the test's 28 tokens."""
LARGE = SMALL | {"budget": 4000}
MODES: dict[str, dict[str, Any]] = {
    "static": {"static": True},
    "pyramid": {"allocation": "pyramid"},
    "adaptive": {"allocation": "adaptive"},
    "int8": {"quantization": "int8"},
    "replay": {"record": True},
}
YES, FAULT = "yes", "FAULT"
GATHER, DENSE = "gather", "dense"
"""How `replay` attends by itself."""
AS_STATIC = "as StaticCache"
"""transformers' own static cache gives other logits than its dynamic one, and ours with it."""
HEADER = """# Modes by model type

Written by `python -m tests.architectures.modes`; do not edit it by hand. Tiny models with random
weights, a left-padded batch of two, 18 + 10 tokens, policy `keydiff`.

- **static**: under eviction the same logits as without `static=True`, to 1e-4; steps are not
  compiled here. *as StaticCache*: the model gives other logits with transformers' own `StaticCache`
  than with `DynamicCache`; ours, with a budget that is not reached, gives those of the former.
- **pyramid**, **adaptive**: with a budget that is not reached, logits equal those of `DynamicCache`
  to 1e-4; with one that is, they are finite and the bytes held are those of a uniform budget.
- **int8**: finite under eviction, at the bytes of int8 and its scales. (Rounding to 8 bits makes
  float32's last digits matter: int8 with and without `static=True` may part after some tokens.)
- **replay**: one forward of `replay(model, trace)` gives the logits of the ten decoding steps to
  1e-4, gathering the living tokens period by period (*gather*), or, where attention is not plain
  causal softmax attention, by a mask (*dense*).

Types that the cache refuses anyway, here or in [architectures.md](architectures.md), or that have
no `DynamicCache`, are left out.
"""


class Wrong(Exception):
    """A check found wrong numbers."""


def _equal(run: Run, expected: Run) -> None:
    scale = max(1.0, float(expected.logits.abs().max()))
    difference = float((run.logits - expected.logits).abs().max()) / scale
    if not difference < 1e-4:
        raise Wrong(f"logits differ by {difference:.1e}")


def _finite(run: Run) -> None:
    if not bool(torch.isfinite(run.logits).all()):
        raise Wrong("logits are not finite")


def _check(model: PreTrainedModel, mode: str, runs: dict[str, Run], inputs: Any) -> str:
    options = MODES[mode]

    if mode == "replay":
        return _check_replay(model, inputs)

    def run(settings: dict[str, Any]) -> Run:
        cache = SparseBudgetCache(**settings, **options, config=model.config)
        return generate(model, inputs[0], cache, 10, inputs[1])

    under_budget = run(SMALL)
    _finite(under_budget)
    held = under_budget.cache.stats().bytes_held
    uniform = runs["uniform"].cache.stats().bytes_held
    if mode == "static":
        try:
            _equal(under_budget, runs["uniform"])
        except Wrong:
            theirs = StaticCache(config=model.config, max_cache_len=40)
            _equal(run(LARGE), generate(model, inputs[0], theirs, 10, inputs[1]))
            return AS_STATIC
    elif mode == "int8":
        if held > uniform:
            raise Wrong(f"{held} bytes held, not fewer than {uniform}")
    else:
        _equal(run(LARGE), runs["dense"])
        if held > uniform:
            raise Wrong(f"{held} bytes held, more than the {uniform} of uniform")
    return YES


def _check_replay(model: PreTrainedModel, inputs: Any) -> str:
    cache = SparseBudgetCache(**SMALL, record=True, config=model.config)
    run = generate(model, inputs[0], cache, 10, inputs[1])
    if not cache.stats().evictions:
        raise UnsupportedModelError("nothing to evict")
    ids = torch.cat(run.inputs, dim=1)
    mask = torch.cat([inputs[1], inputs[1].new_ones(2, ids.shape[1] - 18)], dim=1)
    for way in ("dense", "auto"):
        with torch.no_grad(), replay(model, cache.trace(), way=way):
            logits = model(input_ids=ids, attention_mask=mask).logits
        _equal(Run(run.tokens, logits[:, 17:].float(), run.inputs, cache), run)
    plain = all(site.plain for site in attention_sites(model).calls)
    return GATHER if plain else DENSE


def check_modes(model_type: str) -> dict[str, str]:
    """What each mode does with a type: "yes", "refused: ..." or "FAULT: ..."; nothing for a type
    that is refused without any."""
    model = build_tiny(model_type)[0]
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, min(vocabulary, 60), (2, 18), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    caches = {
        "dense": DynamicCache(config=model.config),
        "uniform": SparseBudgetCache(**SMALL, config=model.config),
    }
    try:
        runs = {name: generate(model, ids, cache, 10, mask) for name, cache in caches.items()}
    except UnsupportedModelError:
        return {}
    results = {}
    for mode in MODES:
        try:
            results[mode] = _check(model, mode, runs, (ids, mask))
        except UnsupportedModelError as refusal:
            results[mode] = f"{REFUSED}: {refusal}"
        except Exception as error:
            results[mode] = f"{FAULT}: {type(error).__name__}: {error}"
    return results


def _write(results: dict[str, dict[str, str]], out: Path) -> None:
    lines = [
        HEADER,
        f"Versions: transformers {transformers.__version__}, torch {torch.__version__}.",
    ]
    lines += ["", "| | " + " | ".join(MODES) + " |", "|---" * (len(MODES) + 1) + "|"]
    for kind in (YES, AS_STATIC, GATHER, DENSE, REFUSED, FAULT):
        counts = Counter(
            mode for row in results.values() for mode, r in row.items() if r.startswith(kind)
        )
        if counts:
            lines.append(f"| {kind} | " + " | ".join(str(counts[mode]) for mode in MODES) + " |")
    lines += ["", "| type | " + " | ".join(MODES) + " |", "|---" * (len(MODES) + 1) + "|"]
    for model_type, row in results.items():
        cells = [row[mode].partition(":")[0] for mode in MODES]
        lines.append(f"| {model_type} | " + " | ".join(cells) + " |")
    reasons = Counter(
        f"{mode}: {answer.partition(': ')[2]}"
        for row in results.values()
        for mode, answer in row.items()
        if answer not in (YES, AS_STATIC, GATHER, DENSE)
    )
    lines += ["", "Reasons:", ""]
    lines += [f"- {reason} ({count})" for reason, count in reasons.most_common()]
    out.write_text("\n".join(lines) + "\n")
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns 1 when a mode has a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", help="comma-separated model types; by default all")
    options = parser.parse_args(arguments)
    reports = json.loads((REPOSITORY / "docs" / "architectures.json").read_text())
    left_out = {
        report["model_type"]
        for report in reports
        if report["result"] in (NO_CACHE, NOT_BUILT, REFUSED)
    }
    types = options.types.split(",") if options.types else causal_lm_types()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    results = {}
    with tqdm([each for each in types if each not in left_out]) as progress:
        for model_type in progress:
            progress.set_postfix_str(model_type)
            if not (found := check_modes(model_type)):
                continue
            results[model_type] = found
            for mode, answer in results[model_type].items():
                if answer.startswith(FAULT):
                    progress.write(f"{model_type}, {mode}: {answer}")
    if options.types is None:
        _write(results, REPOSITORY / "docs" / "modes.md")
    else:
        print(json.dumps(results, indent=1))
    return int(any(FAULT in answer for row in results.values() for answer in row.values()))


if __name__ == "__main__":
    sys.exit(main())

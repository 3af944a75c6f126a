"""What training under a budget costs: memory of rollouts against their length, and steps of a real
model by each method.

    python -m benchmarks.recipe --task FILE.jsonl

Rollouts of a model with random weights, dense and under the budget, hold what they hold whatever
the weights; nothing ends them early. Steps of the real model are those of `sparse_cache.recipe`
with LoRA, in a process for each method.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm

from sparse_cache import SparseBudgetCache
from sparse_cache.embedded_model import load_embedded_model
from sparse_cache.recipe.options import METHODS
from sparse_cache.recipe.rollouts import Sampler
from sparse_cache.recipe.run_folder import read_lines

from .models import random_model
from .reporting import common_options, parse, print_table, write_results

SECONDS = ("seconds/rollout", "seconds/reward", "seconds/score", "seconds/update")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `recipe.json`, and return what was written."""
    options = _options(arguments)
    results: dict[str, Any] = {"memory": [], "steps": []}
    for tokens in tqdm(options.lengths, desc="rollouts", disable=options.quick):
        results["memory"].append(_rollouts(tokens, options))
        write_results("recipe", options, results)
    if options.task is not None:
        with tempfile.TemporaryDirectory() as folder:
            model = _model_folder(options, Path(folder))
            for method in tqdm(METHODS, desc="methods", disable=options.quick):
                results["steps"].append(_steps(method, model, Path(folder) / method, options))
                write_results("recipe", options, results)
    _print(results)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Costs of training under a budget.")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--task", default=None, help="JSONL file for the steps of the real model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-budget", type=int, default=48)
    parser.add_argument("--step-interval", type=int, default=8)
    parser.add_argument("--step-tokens", type=int, default=32, help="new tokens of their rollouts")
    options = parse(parser, arguments)
    if options.quick:
        options.lengths, options.budget, options.interval = [64, 128], 32, 16
    return options


def _rollouts(tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Two rollouts of `tokens` after a prompt of 32, dense and sparse."""
    model = random_model("tiny", options.seed)
    sampler = Sampler(group=2, new_tokens=tokens, temperature=1.0, end_ids=[10**6], pad_id=0)
    prompt = torch.randint(1, 256, (1, 32))
    prompts = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    row: dict[str, Any] = {"tokens": tokens, "budget": options.budget, "interval": options.interval}
    for name, new_cache in (
        ("dense", lambda: None),
        ("sparse", lambda: SparseBudgetCache(options.budget, interval=options.interval)),
    ):
        started = time.perf_counter()
        rollouts = sampler.sample(model, prompts, new_cache)
        row[f"{name}_seconds"] = time.perf_counter() - started
        row[f"{name}_bytes"] = rollouts.bytes_held
        assert int(rollouts.lengths.min()) == tokens
    return row


def _model_folder(options: argparse.Namespace, folder: Path) -> str:
    if options.model != "embedded":
        return str(options.model)
    model, tokenizer = load_embedded_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def _steps(method: str, model: str, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    given = {
        "method": method,
        "model": model,
        "task": options.task,
        # In so few tokens a small model only earns something if it does not explain.
        "system-prompt": "Answer with one number.",
        "output": output,
        "steps": options.steps,
        "budget": options.step_budget,
        "interval": options.step_interval,
        "new-tokens": options.step_tokens,
        "prompt-tokens": 128,
        "prompts": 1,
        "group": 4,
        "micro-batch": 4,
        "lora-rank": 8,
        "learning-rate": 1e-4,
        "evaluate-every": 0,
        "evaluate-examples": 4,
        "save-every": 0,
        "seed": options.seed,
        "progress": "false",
    }
    # The first evaluation decodes the untrained model; both are short, and not what is measured.
    command = [sys.executable, "-m", "sparse_cache.recipe.train", "--trackers"]
    for name, value in given.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    lines = read_lines(output / "metrics.jsonl")
    numbers = [value for line in lines for value in line.values()]
    return {
        "method": method,
        "steps": len(lines),
        "not_a_number": sum(value is None for value in numbers),
        "seconds": median(sum(line[name] for name in SECONDS) for line in lines),
        "rollout_seconds": median(line["seconds/rollout"] for line in lines),
        "update_seconds": median(line["seconds/update"] for line in lines),
        "kv_bytes_held": max(line["kv_bytes_held"] for line in lines),
        "kv_bytes_dense": max(line["kv_bytes_dense"] for line in lines),
        "peak_memory_mib": max(line["peak_memory_mib"] for line in lines),
        "mismatch_kl": median(line["mismatch/kl_k1"] for line in lines),
        "xi_p5": median(line["mismatch/xi_p5"] for line in lines),
        "reward": sum(line["reward"] for line in lines) / len(lines),
        "steps_with_gradient": sum(line["grad_norm"] > 0 for line in lines),
        "rejected": sum(line["rejected"] for line in lines) / len(lines),
        "grad_norm": median(line["grad_norm"] for line in lines),
        "settings": {name: str(value) for name, value in given.items() if name not in _LOCAL},
    }


_LOCAL = ("model", "output", "task")


def _print(results: dict[str, Any]) -> None:
    print_table(
        "Bytes of keys and values that rollouts hold (MiB)",
        ("new tokens", "dense", "sparse", "dense s", "sparse s"),
        [
            (
                str(row["tokens"]),
                row["dense_bytes"] / 2**20,
                row["sparse_bytes"] / 2**20,
                row["dense_seconds"],
                row["sparse_seconds"],
            )
            for row in results["memory"]
        ],
    )
    if results["steps"]:
        print_table(
            "Steps of the real model",
            ("method", "s/step", "rollout s", "update s", "KV MiB", "peak MiB", "xi p5"),
            [
                (
                    row["method"],
                    row["seconds"],
                    row["rollout_seconds"],
                    row["update_seconds"],
                    row["kv_bytes_held"] / 2**20,
                    row["peak_memory_mib"],
                    row["xi_p5"],
                )
                for row in results["steps"]
            ],
        )


if __name__ == "__main__":
    main()

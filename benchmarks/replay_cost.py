"""What a learner's forward and backward cost under replay, against a dense learner.

Both take turns in one process: attention alone in the shapes of two models, and a whole training
step of the real model (with gradient checkpointing; the head reads 64 columns, so that layers are
compared and not the head). Peak memory is that of a process which does only that. Operations are
counted, not measured.

    python -m benchmarks.replay_cost --model embedded
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparse_cache import NEVER, EvictionTrace
from sparse_cache.kernels.replay_attention import (
    gathered_pairs,
    replay_attention,
    visible_pairs,
)
from sparse_cache.replay import replay

from .models import open_model
from .pairing import spread, time_in_turns
from .reporting import common_options, parse, print_table, write_results

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}
"""Query heads, KV heads and head size of one layer."""
COLUMNS = 64
FORWARD, BACKWARD = 4, 10
"""Operations for each pair and coordinate: 2 products in the forward, 5 in the backward."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `replay_cost.json` after every row, and return what was written."""
    options = _options(arguments)
    if options.peak:
        print(json.dumps(_peak(options)))
        return {}
    results: dict[str, Any] = {"attention": [], "step": [], "logprobs": _logprobs(options)}
    for name in SHAPES:
        for length in options.lengths:
            results["attention"].append(_attention(name, length, options))
            write_results("replay_cost", options, results)
    model, _ = open_model(options.model, options.seed)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for length in options.lengths:
        results["step"].append(_step(model, length, options))
        write_results("replay_cost", options, results)
    _print(results)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("Cost of a learner's step under replay.")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--pairs", type=int, default=5, help="ratios for attention alone")
    parser.add_argument("--step-pairs", type=int, default=3, help="ratios for whole steps")
    parser.add_argument("--peak", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parse(parser, arguments)
    if options.quick:
        options.budget, options.interval, options.prompt = 32, 16, 24
        options.lengths, options.pairs, options.step_pairs = [128], 2, 1
    return options


def deaths_of_a_rollout(
    heads: int, length: int, options: argparse.Namespace, seed: int = 0
) -> torch.Tensor:
    """`[1, H, T]` int32: a random `budget` of the tokens stays at every eviction, in each head,
    among them the 4 first and the 8 newest, as with a policy that goes by content."""
    generator = torch.Generator().manual_seed(seed)
    budget, interval = options.budget, options.interval
    deaths = torch.full((heads, length), NEVER, dtype=torch.int32)
    alive = torch.arange(min(options.prompt, length)).expand(heads, -1)
    while True:
        seen = int(alive[0, -1]) + 1
        if alive.shape[1] >= budget + interval:
            score = torch.rand(heads, alive.shape[1], generator=generator)
            score[:, :4] = score[:, -8:] = 2
            kept = score.topk(budget, dim=1).indices.sort(1).values
            gone = torch.ones_like(alive, dtype=torch.bool).scatter_(1, kept, False)
            head = torch.arange(heads)[:, None].expand_as(alive)
            deaths[head[gone], alive[gone]] = seen
            alive = alive.gather(1, kept)
        if seen == length:
            return deaths[None]
        room = budget + interval - alive.shape[1]
        new = torch.arange(seen, min(seen + room, length)).expand(heads, -1)
        alive = torch.cat([alive, new], dim=1)


class _Attention:
    """Forward and backward of one layer's attention, dense or by period."""

    def __init__(self, shape: tuple[int, int, int], deaths: torch.Tensor, dense: bool) -> None:
        heads, kv_heads, size = shape
        length = deaths.shape[2]
        generator = torch.Generator().manual_seed(0)

        def draw(count: int) -> torch.Tensor:
            tensor = torch.randn(1, length, count, size, generator=generator)
            return tensor.transpose(1, 2).requires_grad_()

        self.tensors = [draw(heads), draw(kv_heads), draw(kv_heads)]
        self.grad = torch.randn(1, heads, length, size, generator=generator)
        self.group, self.deaths, self.dense = heads // kv_heads, deaths, dense

    def step(self) -> None:
        query, key, value = self.tensors
        scaling = query.shape[-1] ** -0.5
        if self.dense:
            # As transformers calls it on a CPU without a mask.
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=self.group > 1
            )
        else:
            output = replay_attention(query, key, value, self.deaths, scaling=scaling)
        output.backward(self.grad)

    def after(self) -> None:
        for tensor in self.tensors:
            tensor.grad = None


class _Step:
    """Forward, loss and backward of a model."""

    def __init__(self, model: Any, ids: torch.Tensor, trace: EvictionTrace | None) -> None:
        self.model, self.ids, self.trace = model, ids, trace

    def step(self) -> None:
        if self.trace is None:
            self._forward().backward()
        else:
            with replay(self.model, self.trace):
                loss = self._forward()
            loss.backward()

    def _forward(self) -> torch.Tensor:
        logits = self.model(self.ids, use_cache=False, logits_to_keep=COLUMNS).logits
        targets = self.ids[0, -COLUMNS:].roll(-1)
        return torch.nn.functional.cross_entropy(logits[0].float(), targets)

    def after(self) -> None:
        self.model.zero_grad()


def _attention(name: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    heads, kv_heads, size = SHAPES[name]
    deaths = deaths_of_a_rollout(kv_heads, length, options)
    sides = [_Attention(SHAPES[name], deaths, dense) for dense in (False, True)]
    for side in sides:
        side.step()
        side.after()
    label = f"attention of {name}, {length} tokens"
    times = time_in_turns(*sides, periods=options.pairs, steps=1, turn=1, label=label)
    group = heads // kv_heads
    each = group * size * (FORWARD + BACKWARD)
    dense_pairs = kv_heads * length * (length + 1) // 2
    return {
        "shape": name,
        "tokens": length,
        "ratio": spread(times.ratios()),
        "gather_seconds": spread([t for period in times.subject for t in period]),
        "dense_seconds": spread([t for period in times.rival for t in period]),
        "visible_operations": visible_pairs(deaths) * each,
        "gather_operations": gathered_pairs(deaths) * each,
        "dense_operations": dense_pairs * each,
        "gather_peak_mib": _in_a_process("gather", name, length, options),
        "dense_peak_mib": _in_a_process("dense", name, length, options),
    }


def _in_a_process(way: str, name: str, length: int, options: argparse.Namespace) -> float | None:
    """Peak memory in MiB, beyond what the inputs and the libraries take; None in a smoke run."""
    if options.quick:
        return None
    command = [sys.executable, "-m", "benchmarks.replay_cost", "--peak", way, name, str(length)]
    command += ["--budget", str(options.budget), "--interval", str(options.interval)]
    command += ["--prompt", str(options.prompt), "--threads", str(torch.get_num_threads())]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def _peak(options: argparse.Namespace) -> float:
    way, name, length = options.peak
    if way in ("naive", "chunks"):
        return _peak_of_logprobs(way, int(length))
    small = argparse.Namespace(budget=32, interval=16, prompt=24)
    warm = _Attention(SHAPES[name], deaths_of_a_rollout(SHAPES[name][1], 96, small), way == "dense")
    warm.step()
    deaths = deaths_of_a_rollout(SHAPES[name][1], int(length), options)
    side = _Attention(SHAPES[name], deaths, way == "dense")
    _resident()
    before = _resident()
    side.step()
    return (_resident() - before) / 2**10


def _resident() -> int:
    """Most KiB resident since the last call of this, which starts counting anew (Linux)."""
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0])
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def _logprobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak memory of log-probabilities with gradients, vocabulary 150,000, hidden size 64."""
    lengths = [64] if options.quick else [1024, 2048]
    return [
        {
            "tokens": length,
            "vocabulary": 150_000,
            "naive_peak_mib": _in_a_process("naive", "-", length, options),
            "chunks_peak_mib": _in_a_process("chunks", "-", length, options),
        }
        for length in lengths
    ]


def _peak_of_logprobs(way: str, length: int) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM

    from sparse_cache.replay import rollout_logprobs

    config = LlamaConfig(
        vocab_size=150_000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(5, 1000, (1, length))
    model(ids[:, :8]).logits.sum().backward()
    _resident()
    before = _resident()
    if way == "naive":
        logs = model(ids).logits[:, :-1].float().log_softmax(-1)
        logs.gather(-1, ids[:, 1:, None]).sum().backward()
    else:
        rollout_logprobs(model, ids).logprobs.sum().backward()
    return (_resident() - before) / 2**10


def _step(model: Any, length: int, options: argparse.Namespace) -> dict[str, Any]:
    config = model.config.get_text_config()
    layers = range(config.num_hidden_layers)
    deaths = [
        deaths_of_a_rollout(config.num_key_value_heads, length, options, seed) for seed in layers
    ]
    trace = EvictionTrace(deaths, list(layers), length)
    ids = torch.randint(config.vocab_size, (1, length))
    sides = [_Step(model, ids, trace), _Step(model, ids, None)]
    for side in sides if length <= 1024 else []:
        side.step()
        side.after()
    times = time_in_turns(
        *sides, periods=options.step_pairs, steps=1, turn=1, label=f"step, {length} tokens"
    )
    return {
        "model": options.model,
        "threads": torch.get_num_threads(),
        "tokens": length,
        "ratio": spread(times.ratios()),
        "gather_seconds": spread([t for period in times.subject for t in period]),
        "dense_seconds": spread([t for period in times.rival for t in period]),
    }


def _print(results: dict[str, Any]) -> None:
    print_table(
        "Forward and backward, gather / dense",
        ("what", "tokens", "ratio", "quartiles", "operations", "gather MiB", "dense MiB"),
        [
            (
                row.get("shape", "whole step"),
                row["tokens"],
                row["ratio"]["median"],
                "{:.3f}-{:.3f}".format(*row["ratio"]["quartiles"]),
                row["gather_operations"] / row["dense_operations"] if "shape" in row else None,
                row.get("gather_peak_mib"),
                row.get("dense_peak_mib"),
            )
            for row in (*results["attention"], *results["step"])
        ],
    )
    print_table(
        "Peak memory of log-probabilities with gradients (MiB)",
        ("tokens", "all logits", "in chunks"),
        [
            (str(row["tokens"]), row["naive_peak_mib"], row["chunks_peak_mib"])
            for row in results["logprobs"]
        ],
    )


if __name__ == "__main__":
    main()

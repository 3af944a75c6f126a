"""A model that does not use the cache: same bits, same time.

Bits: in one process, logits of a model are computed, then the library is imported and used on that
very model, then the logits are computed again. They must be equal bit for bit.

Time: three processes that never run at the same moment take turns of a few decode steps with a
`DynamicCache`: one has never imported the library, one has imported and used it, and a second one
without the library shows how far two equal processes differ on this machine.

    python -m benchmarks.nochange --model tiny
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from .models import cache_argument, forward, open_model
from .pairing import spread
from .reporting import common_options, parse, print_table, write_results
from .runs import DenseDecoding

CONTEXT = 64
"""Tokens of context in the timed decode steps: small, so that fixed costs are not hidden."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write `nochange.json`, and return what was written."""
    options = _options(arguments)
    names = dict.fromkeys(["tiny", options.model])
    measured = [_measure(name, options) for name in names]
    bits, times = [row for row, _ in measured], [row for _, row in measured]
    _print(bits, times)
    results = {"bits": bits, "times": times}
    write_results("nochange", options, results)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common_options("That models which do not use the cache are not changed by it.")
    parser.add_argument("--turns", type=int, default=60, help="turns of each process")
    parser.add_argument("--turn", type=int, default=10, help="steps in a turn")
    parser.add_argument(
        "--control",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure a second process without the library, to show the noise",
    )
    options = parse(parser, arguments)
    if options.quick:
        options.turns, options.turn, options.control = 12, 5, False
    return options


def compare_bits(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Logits and generated tokens of a model before and after the library is used on it.

    Raises:
        RuntimeError: the library was imported before the first logits could be taken.
    """
    if any(module.split(".")[0] == "sparse_cache" for module in sys.modules):
        raise RuntimeError("sparse_cache was imported too early; the comparison would be void.")
    prompt = torch.tensor([tokenizer.encode("The cache keeps what the next tokens will need.")])
    before = _outputs(model, prompt)
    _use_library(model, prompt)
    after = _outputs(model, prompt)
    return {
        "numbers_compared": sum(tensor.numel() for tensor in before.values()),
        "equal_bits": {key: torch.equal(before[key], after[key]) for key in before},
    }


@torch.no_grad()
def _outputs(model: Any, prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(prompt)
    padded = torch.cat([prompt, prompt.flip(1)])
    padding = torch.ones_like(padded)
    padding[0, :3] = 0
    generated = model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=24,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return {
        "without a cache": forward(model, prompt, None, use_cache=False),
        "padded batch": forward(model, padded, None, use_cache=False, attention_mask=padding),
        "generated tokens": generated.sequences,
        "generated logits": torch.stack(generated.logits),
    }


def _use_library(model: Any, prompt: torch.Tensor) -> None:
    from sparse_cache import SparseBudgetCache

    for policy in ("rkv", "h2o", "streaming"):
        cache = SparseBudgetCache(budget=16, interval=4, policy=policy)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{cache_argument(model): cache},
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
        )
        if not cache.stats().evictions:
            raise RuntimeError(f"policy {policy!r} evicted nothing, so the library was not used.")


def _open_without_library(name: str, seed: int) -> tuple[Any, Any]:
    """The model and tokenizer, with no trace of the library in this process."""
    if name != "embedded":
        return open_model(name, seed)
    # Its loader is part of the library, so another process asks it for the folder.
    code = (
        "from sparse_cache.embedded_model import load_embedded_model as load\n"
        "print(load()[0].config._name_or_path)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"the embedded model could not be loaded: {answer.stderr[-500:]}")
    return open_model(answer.stdout.strip().splitlines()[-1], seed)


class _Worker:
    """A process that opens the model, perhaps uses the library on it, and takes steps when told."""

    def __init__(self, name: str, options: argparse.Namespace, *, uses_library: bool) -> None:
        # Spawned, because a forked process would bring along what this one has imported.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, name, options.seed, torch.get_num_threads(), uses_library),
        )
        self._process.start()
        theirs.close()
        self.bits: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        self.bits = self._pipe.recv()

    def take(self, steps: int) -> float:
        """Mean seconds of a step."""
        self._pipe.send(steps)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.close()
        self._process.join()


def _measure(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    users = (True, False, False) if options.control else (True, False)
    workers = [_Worker(name, options, uses_library=uses) for uses in users]
    seconds: list[list[float]] = [[] for _ in workers]
    try:
        for worker in workers:
            worker.wait_until_ready()
        for number in tqdm(range(options.turns), desc=f"nochange, {name}", leave=False):
            for place in range(len(workers)):
                # The order rotates, so that no process always follows the same other one.
                who = (place + number) % len(workers)
                seconds[who].append(workers[who].take(options.turn))
    finally:
        for worker in workers:
            worker.stop()
    with_library, *without = seconds
    neutral = [sum(turn) / len(turn) for turn in zip(*without, strict=True)]
    ratios = [w / n for w, n in zip(with_library, neutral, strict=True)]
    times = {
        "model": name,
        "ratio": spread(ratios),
        "control_ratio": spread([b / a for a, b in zip(*without, strict=True)])
        if options.control
        else None,
        "step_ms": spread([1e3 * n for n in neutral])["median"],
    }
    return {"model": name, **workers[0].bits}, times


def _serve(pipe: Any, name: str, seed: int, threads: int, uses_library: bool) -> None:
    torch.set_num_threads(threads)
    model, tokenizer = _open_without_library(name, seed)
    bits = compare_bits(model, tokenizer) if uses_library else {}
    decoding = DenseDecoding(model, batch=1, tokens=CONTEXT, constant=True, masked=True)
    for _ in range(5):
        decoding.step()
        decoding.after()
    pipe.send(bits)
    while True:
        try:
            steps = pipe.recv()
        except EOFError:  # the measuring process has closed its end
            return
        total = 0.0
        for _ in range(steps):
            start = time.perf_counter()
            decoding.step()
            total += time.perf_counter() - start
            decoding.after()
        pipe.send(total / steps)


def control(row: dict[str, Any]) -> tuple[float | None, str | None]:
    """Median and quartiles of the ratio between two equal processes, if it was measured."""
    if row["control_ratio"] is None:
        return None, None
    return row["control_ratio"]["median"], "{:.3f} to {:.3f}".format(
        *row["control_ratio"]["quartiles"]
    )


def _print(bits: list[dict[str, Any]], times: list[dict[str, Any]]) -> None:
    print_table(
        "Outputs before and after the library was imported and used",
        ("model", *bits[0]["equal_bits"], "numbers compared"),
        [
            (
                row["model"],
                *("equal" if same else "DIFFERENT" for same in row["equal_bits"].values()),
                row["numbers_compared"],
            )
            for row in bits
        ],
    )
    print_table(
        "Step time with the library imported and used / without it",
        ("model", "ratio", "quartiles", "two equal processes", "quartiles", "step ms"),
        [
            (
                row["model"],
                row["ratio"]["median"],
                "{:.3f}-{:.3f}".format(*row["ratio"]["quartiles"]),
                *control(row),
                row["step_ms"],
            )
            for row in times
        ],
    )


if __name__ == "__main__":
    main()

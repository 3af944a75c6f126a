"""One process of two: a training step on its half of the rollouts that a single process made.

Started by torchrun from test_distributed.py with the folder of the test as argument.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sparse_cache import EvictionTrace
from sparse_cache.recipe.rollouts import Rollouts
from tests.recipe.tiny_run import small_options, small_run


def main(folder: Path) -> None:
    options = small_options(**json.loads((folder / "options.json").read_text()))
    run = small_run(options)
    accelerator = run.accelerator
    rollouts, rewards = load_rollouts(folder)
    half = len(rollouts) // accelerator.num_processes
    rows = torch.arange(len(rollouts))[accelerator.process_index * half :][:half]
    metrics = step_on(run, rollouts.select(rows), rewards[rows])
    state = accelerator.get_state_dict(run.model)
    if accelerator.is_main_process:
        save_file({name: value.contiguous() for name, value in state.items()}, folder / "two.st")
        (folder / "two.json").write_text(json.dumps(metrics))


def step_on(run: object, rollouts: Rollouts, rewards: torch.Tensor) -> dict[str, float]:
    """One step of a run on given rollouts."""
    run._sample = lambda examples: rollouts
    run._judge = lambda examples, rollouts: rewards
    return run._step(0)


def save_rollouts(folder: Path, rollouts: Rollouts, rewards: torch.Tensor) -> None:
    tensors = {
        name: getattr(rollouts, name)
        for name in ("sequences", "attention_mask", "mask", "sampled", "truncated")
    }
    tensors |= {"rewards": rewards, "start": torch.tensor(rollouts.start)}
    save_file(tensors, folder / "rollouts.st")
    if rollouts.trace is not None:
        rollouts.trace.save(folder / "trace.safetensors")


def load_rollouts(folder: Path) -> tuple[Rollouts, torch.Tensor]:
    tensors = load_file(folder / "rollouts.st")
    rewards, start = tensors.pop("rewards"), int(tensors.pop("start"))
    path = folder / "trace.safetensors"
    trace = EvictionTrace.load(path) if path.is_file() else None
    return Rollouts(**tensors, start=start, trace=trace), rewards


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One process of two: a training step on its half of the rollouts that a single process made.

Started by torchrun from test_distributed.py with the folder of the test and `ddp` or `fsdp`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_cache import EvictionTrace
from sparse_cache.recipe.rollouts import Rollouts
from tests.recipe.tiny_run import small_options, small_run


def shard(self: Accelerator, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """In place of `Accelerator.prepare`, which shards on GPUs only: FSDP2 by torch itself."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    kept = {name: optimizer.defaults[name] for name in ("lr", "betas", "weight_decay")}
    return model, type(optimizer)(model.parameters(), **kept)


def main(folder: Path, sharded: bool) -> None:
    options = small_options(**json.loads((folder / "options.json").read_text()))
    if sharded:
        Accelerator.prepare = shard
    run = small_run(options)
    accelerator = run.accelerator
    if sharded:
        # Processes that end their completions at different lengths make equally many steps.
        run.sampler._sharded = True
        torch.manual_seed(accelerator.process_index)
        ends = torch.arange(7, 7 + 20 * accelerator.process_index)
        run.sampler._end_ids = ends
        run.sampler._config.eos_token_id = ends.tolist() or [35]
        run.model.eval()
        sampled = run._sample(run.prompts.of_step(0))
        found = run.learner.logprobs(run.model, sampled, replayed=True)
        # What the process that was done first went on to decode is in no trace.
        assert float((found - sampled.sampled)[sampled.mask].abs().max()) < 1e-4
        lengths = sampled.lengths
        (folder / f"lengths-{accelerator.process_index}.json").write_text(str(lengths.tolist()))
    rollouts, rewards = load_rollouts(folder)
    half = len(rollouts) // accelerator.num_processes
    rows = torch.arange(len(rollouts))[accelerator.process_index * half :][:half]
    metrics = step_on(run, rollouts.select(rows), rewards[rows])
    state = {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight
        for name, weight in accelerator.unwrap_model(run.model).state_dict().items()
    }
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
    main(Path(sys.argv[1]), sharded=sys.argv[2] == "fsdp")

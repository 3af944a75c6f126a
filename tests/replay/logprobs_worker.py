"""One of two processes that take log-probabilities of one model; see test_logprobs.py."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sparse_cache.replay.logprobs import rollout_logprobs
from tests.cache.driving import small_llama

from .distributed_worker import whole
from .rollouts import rollout


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    original = small_llama()
    runs = [
        rollout(original, lengths, 12, seed=i) for i, lengths in enumerate(((40, 23), (31, 35)))
    ]

    def loss(model: Any, index: int, shadow: bool) -> torch.Tensor:
        run = runs[index]
        trace = run.trace if shadow else None
        call = {"attention_mask": run.mask, "chunk_bytes": 8192, "entropy": True}
        logprobs, entropy = rollout_logprobs(model, run.sequences, trace, **call)
        return (logprobs + 0.1 * entropy).sum()

    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", world_size=2, rank=rank
    )
    for shadow in (False, True):
        reference = copy.deepcopy(original)
        (sum(loss(reference, index, shadow) for index in range(2)) / 2).backward()
        expected = {name: p.grad for name, p in reference.named_parameters()}
        models: dict[str, Any] = {"DDP": DistributedDataParallel(copy.deepcopy(original))}
        for kind in ("FSDP", "FSDP, head sharded on its own"):
            model = copy.deepcopy(original)
            for layer in model.model.layers:
                fully_shard(layer)
            if kind != "FSDP":
                fully_shard(model.lm_head)
            models[kind] = fully_shard(model)
        for kind, model in models.items():
            loss(model, rank, shadow).backward()
            for name, parameter in model.named_parameters():
                found, true = whole(parameter.grad), expected[name.removeprefix("module.")]
                worst = float((found - true).norm() / true.norm())
                if not worst < 1e-4:
                    raise SystemExit(f"{kind}, shadow={shadow}: {name} is off by {worst}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One of two processes that train the same model under replay; see test_distributed.py."""

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

from sparse_cache.replay import replay, rollout_logprobs
from tests.cache.driving import VOCABULARY, small_llama

from .rollouts import Rollout, rollout, score

LENGTHS = ((40, 23), (31, 35))
"""Prompts of the rows of each process."""


def loss_of(model: Any, run: Rollout) -> torch.Tensor:
    with replay(model, run.trace):
        logits = model(run.sequences, attention_mask=run.mask).logits
    return score(logits, run)


def loss_in_chunks(model: Any, run: Rollout) -> torch.Tensor:
    """The same number by way of chunks of logits."""
    given = {"attention_mask": run.mask, "chunk_bytes": 4 * VOCABULARY * 7}
    return -rollout_logprobs(model, run.sequences, run.trace, **given).logprobs.sum()


def whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    original = small_llama()
    runs = [rollout(original, lengths, 20, seed=seed) for seed, lengths in enumerate(LENGTHS)]
    reference = copy.deepcopy(original)
    (sum(loss_of(reference, run) for run in runs) / 2).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", world_size=2, rank=rank
    )
    plain = DistributedDataParallel(copy.deepcopy(original))
    sharded = copy.deepcopy(original)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    sharded.train()
    sharded.gradient_checkpointing_enable({"use_reentrant": False})
    # With a head of its own, whose weights are together only while it runs.
    head_apart = copy.deepcopy(original)
    for module in (*head_apart.model.layers, head_apart.lm_head, head_apart):
        fully_shard(module)
    for kind, model, loss in (
        ("DDP", plain, loss_of),
        ("FSDP", sharded, loss_of),
        ("DDP in chunks", plain, loss_in_chunks),
        ("FSDP in chunks", sharded, loss_in_chunks),
        ("FSDP with the head apart", head_apart, loss_in_chunks),
    ):
        model.zero_grad()
        loss(model, runs[rank]).backward()
        for name, parameter in model.named_parameters():
            found, true = whole(parameter.grad), expected[name.removeprefix("module.")]
            worst = float((found - true).norm() / true.norm())
            if not worst < 1e-4:
                raise AssertionError(f"{kind}: gradient of {name} is off by {worst:.1e}")
    (folder / f"passed-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

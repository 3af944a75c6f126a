"""The recipe in two processes over gloo: the step of one, and whole runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.recipe.distributed_worker import save_rollouts, step_on
from tests.recipe.tiny_run import SMALL, save_tiny_model, small_options, small_run

ROOT = Path(__file__).parents[2]


def in_two_processes(*arguments: str, **environment: str) -> None:
    """`torchrun`, as `accelerate launch --cpu` starts only one process without MPI."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"), [("smd", "ddp"), ("sparse_rl", "ddp"), ("smd", "fsdp")]
)
def test_two_processes_make_the_step_of_one(
    model: Path, tmp_path: Path, method: str, kind: str
) -> None:
    given: dict[str, Any] = {
        "model": str(model),
        "output": str(tmp_path / "run"),
        "method": method,
        "micro_batch": 3,
        "aggregation": "token",
    }
    run = small_run(small_options(**given))
    run.model.eval()
    torch.manual_seed(0)
    rollouts = run._sample(run.prompts.of_step(0))
    if method == "sparse_rl":
        # Some rollouts of either process are rejected.
        dense = run.learner.logprobs(run.model, rollouts, replayed=False)
        gaps = (dense - rollouts.sampled).masked_fill(~rollouts.mask, 0.0).amin(1)
        given["reject_below"] = float(gaps.median().exp()) * 1.0001
        run = small_run(small_options(**given))
    rewards = (torch.arange(len(rollouts)) % 3 == 0).float()
    save_rollouts(tmp_path, rollouts, rewards)
    (tmp_path / "options.json").write_text(json.dumps(given))
    one = step_on(run, rollouts, rewards)
    in_two_processes("-m", "tests.recipe.distributed_worker", str(tmp_path), kind)
    two = json.loads((tmp_path / "two.json").read_text())
    assert one["grad_norm"] > 1e-3
    for name in ("loss", "grad_norm", "reward", "mismatch/kl_k3", "mismatch/xi_p5", "rejected"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    weights = load_file(tmp_path / "two.st")
    for name, expected in run.accelerator.get_state_dict(run.model).items():
        # Adam's first step has the size of the learning rate whatever the gradient's, so that
        # rounding shows where a gradient is nearly 0.
        torch.testing.assert_close(weights[name], expected, atol=2e-4, rtol=1e-3)
    if kind == "fsdp":
        lengths = [json.loads((tmp_path / f"lengths-{rank}.json").read_text()) for rank in (0, 1)]
        assert min(lengths[0]) == 20 > max(lengths[1])


@pytest.mark.slow
def test_a_run_of_two_processes(model: Path, tmp_path: Path) -> None:
    arguments = []
    for name, value in (SMALL | {"model": model, "output": tmp_path / "run"}).items():
        if name == "trackers":
            arguments += ["--trackers"]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"--{name}", text]
    # Processes whose completions end at different lengths, and an odd number of held-out examples.
    arguments += ["--task", "recall-mixed", "--evaluate_examples", "5", "--method", "smd"]
    in_two_processes("-m", "sparse_cache.recipe.train", *arguments)
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2]
    evaluated = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert {json.loads(line)["examples"] for line in evaluated} == {5}
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()

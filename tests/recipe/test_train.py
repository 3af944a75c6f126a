"""Whole runs on a tiny model: what they leave behind, going on, and going wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sparse_cache.recipe import models
from sparse_cache.recipe import train as train_module
from sparse_cache.recipe.checkpoints import Checkpoints
from sparse_cache.recipe.evaluate import completions
from sparse_cache.recipe.rollouts import Rollouts
from sparse_cache.recipe.run_folder import read_lines
from sparse_cache.recipe.tasks import RecallTask, recall_tokenizer
from sparse_cache.recipe.train import TrainingStopped, train
from tests.recipe.tiny_run import save_tiny_model, small_options, small_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


LOGGED = {
    "reward", "accuracy", "length", "entropy", "grad_norm", "mismatch/kl_k1", "mismatch/kl_k3",
    "mismatch/xi_p1", "mismatch/xi_p5", "mismatch/xi_p50", "rejected", "weight/mean_raw",
    "weight/max_raw", "weight/mean", "weight/max", "effective_sample_size", "tokens_per_second",
    "kv_bytes_held", "kv_bytes_dense", "truncated", "clipped", "budget", "reward_failures",
}  # fmt: skip


@pytest.mark.parametrize("method", ["dense", "naive", "sparse_rl", "smd"])
def test_a_run_leaves_what_it_should(model: Path, tmp_path: Path, method: str) -> None:
    options = small_options(model, tmp_path / "run", method=method, trackers=["tensorboard"])
    results = train(options)
    assert set(results) == {"dense", "budget 22"}
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line.keys() >= LOGGED
        assert all(line[name] is not None for name in LOGGED)
        assert (line["kv_bytes_held"] < line["kv_bytes_dense"]) == (method != "dense")
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    first = AutoModelForCausalLM.from_pretrained(model)
    changed = [
        not torch.equal(one, other)
        for one, other in zip(reloaded.parameters(), first.parameters(), strict=True)
    ]
    # A random model earns nothing, so that only distillation has something to learn from.
    assert any(changed) == (method == "smd")


def _losses(folder: Path) -> torch.Tensor:
    """`[steps, 3]`: loss, distillation and gradient norm of each step."""
    names = ("loss", "distillation", "grad_norm")
    lines = read_lines(folder / "metrics.jsonl")
    return torch.tensor([[line[name] for name in names] for line in lines])


def _assert_same_course(one: Path, other: Path, steps: int) -> None:
    assert len(_losses(one)) == steps
    torch.testing.assert_close(_losses(other), _losses(one), atol=1e-6, rtol=0)


@pytest.mark.parametrize("adaptive", [False, True])
def test_two_and_two_steps_are_four(model: Path, tmp_path: Path, adaptive: bool) -> None:
    changes: dict[str, Any] = {"task": "recall-mixed", "warmup_steps": 3}
    if adaptive:
        changes |= {"adaptive_budget": True, "adaptive_least": 16, "adaptive_most": 64}
    train(small_options(model, tmp_path / "whole", steps=4, **changes))
    train(small_options(model, tmp_path / "parts", steps=2, save_every=1, **changes))
    # As a crash in the next step would leave it.
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0, "grad_norm": 1.0}\n{"step": 4, "lo')
    train(small_options(model, tmp_path / "parts", steps=4, resume=True, **changes))
    _assert_same_course(tmp_path / "whole", tmp_path / "parts", steps=4)
    budgets = [line["budget"] for line in read_lines(tmp_path / "parts" / "metrics.jsonl")]
    assert (len(set(budgets)) > 1) == adaptive
    weights = load_file(tmp_path / "parts" / "final" / "model.safetensors")
    for name, expected in load_file(tmp_path / "whole" / "final" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], expected, atol=1e-6, rtol=0)
    kept = sorted(path.name for path in (tmp_path / "parts").glob("checkpoint-*"))
    assert kept == ["checkpoint-000002", "checkpoint-000004"]


def test_killed_while_saving(model: Path, tmp_path: Path) -> None:
    """The half-written checkpoint is passed over, and the run goes on from the one before."""
    train(small_options(model, tmp_path / "whole", steps=3))
    script = (
        "import os, signal\n"
        "from accelerate import Accelerator\n"
        "from sparse_cache.recipe.train import train\n"
        "from tests.recipe.tiny_run import small_options\n"
        "save = Accelerator.save_state\n"
        "def dies(self, folder, **rest):\n"
        "    save(self, folder, **rest)\n"
        "    if '000002' in folder:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "Accelerator.save_state = dies\n"
        f"train(small_options({str(model)!r}, {str(tmp_path / 'run')!r}, steps=3, save_every=1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert names == ["checkpoint-000001", "checkpoint-000002.partial"]
    train(small_options(model, tmp_path / "run", steps=3, save_every=1, resume=True))
    _assert_same_course(tmp_path / "whole", tmp_path / "run", steps=3)
    assert not list((tmp_path / "run").glob("*.partial"))


def test_ctrl_c_ends_the_step_and_saves(model: Path, tmp_path: Path) -> None:
    script = (
        "from sparse_cache.recipe.train import train\n"
        "from tests.recipe.tiny_run import small_options\n"
        f"train(small_options({str(model)!r}, {str(tmp_path)!r}, steps=10_000))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.read_text().count("\n") > 1):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert b"go on with --resume" in error
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert int(checkpoint.name[-6:]) == len(read_lines(metrics))


def test_a_full_disk_leaves_the_checkpoint_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = train_module.Accelerator.save_state

    def full(self: Any, folder: str, **rest: Any) -> None:
        save(self, folder, **rest)
        if "000002" in folder:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_module.Accelerator, "save_state", full)
    with pytest.raises(OSError, match=r"newest whole one is .*checkpoint-000001.*--resume"):
        train(small_options(model, tmp_path, save_every=1))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.bin"])
def test_a_damaged_checkpoint_says_what_to_do(model: Path, tmp_path: Path, name: str) -> None:
    train(small_options(model, tmp_path, steps=2, save_every=1))
    broken = tmp_path / "checkpoint-000002" / name
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    options = small_options(model, tmp_path, steps=3, save_every=1, resume=True)
    with pytest.raises(ValueError, match=r"checkpoint-000002 is damaged .*from checkpoint-000001"):
        train(options)
    shutil.rmtree(tmp_path / "checkpoint-000002")
    train(options)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_two_runs_do_not_share_a_folder(model: Path, tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(ValueError, match="another run is writing to output="),
    ):
        train(small_options(model, tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_warm_start_of_other_options_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "warm-start"
    folder.mkdir()
    (folder / "warm_start.json").write_text('{"seed": 3}')
    with pytest.raises(ValueError, match="was made with other options"):
        train(small_options("tiny", tmp_path))


def test_a_loss_that_is_no_number_stops_with_the_batch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = train_module.micro_loss

    def bad(*arguments: Any) -> Any:
        found = broken(*arguments)
        return type(found)(**(vars(found) | {"loss": found.loss * float("nan")}))

    monkeypatch.setattr(train_module, "micro_loss", bad)
    with pytest.raises(TrainingStopped, match="loss of step 0 is nan"):
        train(small_options(model, tmp_path))
    saved = load_file(tmp_path / "bad-batch-000000-0.safetensors")
    assert len(saved["sequences"]) == len(saved["rewards"]) == 8


def test_a_gradient_that_is_no_number_stops_before_the_weights_do(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = train_module.Accelerator.clip_grad_norm_

    def bad(self: Any, parameters: Any, most: float) -> torch.Tensor:
        return clip(self, parameters, most) * float("inf")

    monkeypatch.setattr(train_module.Accelerator, "clip_grad_norm_", bad)
    with pytest.raises(TrainingStopped, match="gradient norm of step 0 is inf"):
        train(small_options(model, tmp_path, method="smd"))
    assert (tmp_path / "bad-batch-000000-0.safetensors").is_file()


def test_rewards_that_fail_are_counted_or_stop_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Any, example: Any, completion: str) -> float:
        raise KeyError("no such key")

    monkeypatch.setattr(RecallTask, "reward", failing)
    train(small_options(model, tmp_path / "counted", steps=1))
    (line,) = read_lines(tmp_path / "counted" / "metrics.jsonl")
    assert line["reward"] == 0.0
    assert line["reward_failures"] >= 8
    with pytest.raises(RuntimeError, match="KeyError"):
        train(small_options(model, tmp_path / "stopped", stop_on_reward_error=True))


def test_resume_refuses_another_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        train(small_options(model, tmp_path, resume=True))
    train(small_options(model, tmp_path, steps=1))
    before = (tmp_path / "options.yaml").read_text()
    with pytest.raises(ValueError, match="add --resume"):
        train(small_options(model, tmp_path, steps=1, seed=3))
    assert (tmp_path / "options.yaml").read_text() == before
    with pytest.raises(ValueError, match=r"method='smd' there and 'naive' here"):
        train(small_options(model, tmp_path, method="naive", resume=True))
    other = save_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="model="):
        train(small_options(other, tmp_path, resume=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 7}, "budget=7"),
        ({"evaluate_budgets": [22, 3]}, "budget=3"),
        ({"adaptive_budget": True, "adaptive_least": 2}, "budget=2"),
        ({"task": "recal"}, "did you mean recall"),
        ({"policy": "rvk"}, "rkv"),
        ({"policy_options": {"kernel_size": 2}}, "kernel_size"),
        ({"policy_options": {"kernal_size": 3}}, "kernal_size"),
        ({"prompts": 2, "prompt_tokens": 3}, "prompt_tokens"),
        ({"minibatches": 9}, "minibatches=9 is more than the 8 rollouts"),
        ({"minibatches": 3, "estimator": "online_dpo"}, "more than the 2 groups"),
        ({"trackers": ["nope"]}, "nope is unknown or not installed"),
    ],
)
def test_bad_input_is_refused_before_training(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(small_options(model, tmp_path, **changes))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_models_that_could_not_be_trained_or_saved_are_refused(model: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(model, tmp_path / "bad")
    config = json.loads((bad / "generation_config.json").read_text())
    (bad / "generation_config.json").write_text(json.dumps(config | {"early_stopping": "x"}))
    with pytest.raises(ValueError, match="early_stopping"):
        train(small_options(bad, tmp_path / "run"))
    endless = shutil.copytree(model, tmp_path / "endless")
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        values = json.loads((endless / name).read_text())
        values.pop("eos_token_id", None)
        values.pop("eos_token", None)
        (endless / name).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="no end-of-text token"):
        train(small_options(endless, tmp_path / "run2"))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="could not be opened, as a folder or from the hub"):
        train(small_options(tmp_path / "none", tmp_path / "run"))


def test_a_generation_config_that_cannot_be_saved_is_found_at_the_start(model: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    models._check_generation_config(loaded)
    # Changed after loading, as by a script around the recipe: transformers is strict at the save.
    loaded.generation_config.temperature = 0.5
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid"):
        models._check_generation_config(loaded)


def test_a_model_without_padding_token_trains(model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    for name in ("generation_config.json", "config.json", "tokenizer_config.json"):
        values = json.loads((bare / name).read_text())
        values.pop("pad_token_id", None)
        values.pop("pad_token", None)
        (bare / name).write_text(json.dumps(values))
    train(small_options(bare, tmp_path / "run", task="recall-mixed", steps=1))
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 1


def test_the_tail_of_the_ratio_warns_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(small_options(model, tmp_path, method="naive", warn_tail_below=0.999))
    warnings = [record.message for record in caplog.records if "5th percentile" in record.message]
    assert len(warnings) == 1
    assert "use method=smd or sparse_rl, or raise budget" in warnings[0]


def test_a_run_that_left_no_checkpoint_begins_anew(model: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"ste')
    train(small_options(model, tmp_path, steps=1))
    assert [line["reward"] for line in read_lines(tmp_path / "metrics.jsonl")] == [0.0]


def test_checkpoints_ignore_what_is_not_whole(model: Path, tmp_path: Path) -> None:
    options = small_options(model, tmp_path)
    for name in ("checkpoint-000001", "checkpoint-000002.partial"):
        (tmp_path / name).mkdir()
    assert Checkpoints(options, train_module.Accelerator(cpu=True)).all() == []


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_does_not_move_the_policy(tmp_path: Path, checkpointed: bool) -> None:
    """What an update computes is what was sampled, also in models that are trained with noise."""
    model = save_tiny_model(tmp_path / "model", attention_dropout=0.5)
    options = small_options(
        model, tmp_path / "run", method="smd", gradient_checkpointing=checkpointed
    )
    run = small_run(options)
    run.model.eval()
    torch.manual_seed(0)
    rollouts = run._sample(run.prompts.of_step(0))
    train_module.deterministic(run.model)
    calls = []
    layer = run.model.model.layers[0]
    if checkpointed:
        function = layer._gradient_checkpointing_func
        layer._gradient_checkpointing_func = lambda *given: calls.append(1) or function(*given)
    learned = run.learner.read(run.model, rollouts)
    gap = (learned.logprobs - rollouts.sampled)[rollouts.mask].abs().max()
    assert float(gap) < 1e-4
    assert bool(calls) == checkpointed


def test_verifiers_see_no_end_tokens() -> None:
    """Neither the end token nor padding need be special to the tokenizer."""
    tokenizer = recall_tokenizer()
    a, b, end = tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    rollouts = Rollouts(
        sequences=torch.tensor([[b, a, end, b, b], [b, a, a, a, a]]),
        attention_mask=torch.ones(2, 5).long(),
        start=1,
        mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool(),
        sampled=torch.zeros(2, 4),
        truncated=torch.tensor([False, True]),
        trace=None,
    )
    assert completions(tokenizer, rollouts) == ["a", "a a a a"]


def test_a_verifier_that_lacks_a_package_stops_at_the_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: Any, example: Any, completion: str) -> float:
        raise ImportError("pip install it")

    monkeypatch.setattr(RecallTask, "reward", missing)
    with pytest.raises(ImportError, match="pip install it"):
        train(small_options(model, tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_large_seeds_and_launcher_settings_change_nothing_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(small_options(model, tmp_path / "plain", steps=1, seed=987_654_321))
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    train(small_options(model, tmp_path / "four", steps=1, seed=987_654_321))
    _assert_same_course(tmp_path / "plain", tmp_path / "four", steps=1)
    shutil.copytree(
        tmp_path / "plain" / "checkpoint-000001", tmp_path / "plain" / "checkpoint-best"
    )
    options = small_options(model, tmp_path / "plain", steps=0, seed=987_654_321, resume=True)
    with pytest.raises(ValueError, match="steps=0, but the checkpoint has done 1"):
        train(options)


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"optimizer": "adamw_8bit"}])
def test_ways_to_save_memory(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    train(small_options(model, tmp_path / "run", **changes))
    plain = small_options(model, tmp_path / "plain")
    train(plain)
    one, other = _losses(tmp_path / "run"), _losses(tmp_path / "plain")
    torch.testing.assert_close(one[0], other[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("four_bits", [False, True])
def test_lora_trains_saves_and_resumes(tmp_path: Path, four_bits: bool) -> None:
    # The 4-bit weights of bitsandbytes on a CPU come in blocks of 32 rows.
    model = save_tiny_model(tmp_path / "model", intermediate_size=192)
    changes: dict[str, Any] = {
        "lora_rank": 4,
        "load_in_4bit": four_bits,
        "reference_kl": 0.1,
        "gradient_checkpointing": True,
    }
    train(small_options(model, tmp_path / "whole", steps=3, **changes))
    train(small_options(model, tmp_path / "parts", steps=1, **changes))
    train(small_options(model, tmp_path / "parts", steps=3, resume=True, **changes))
    _assert_same_course(tmp_path / "whole", tmp_path / "parts", steps=3)
    names = {path.name for path in (tmp_path / "parts" / "checkpoint-000003").iterdir()}
    assert "adapter.safetensors" in names
    assert "model.safetensors" not in names
    assert (tmp_path / "parts" / "final" / "adapter_model.safetensors").is_file()
    adapter = load_file(tmp_path / "parts" / "final" / "adapter_model.safetensors")
    up = {name: weight for name, weight in adapter.items() if "lora_B" in name}
    assert len(up) == 3 * 7
    assert all(float(weight.abs().max()) > 0 for weight in up.values()), "a layer learned nothing"
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    # The reference is the base with its adapter off: equal at first, then not.
    assert lines[0]["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[2]["reference_kl"] > 1e-6


def test_environment_is_left_alone() -> None:
    code = "import sparse_cache.recipe.train, os, sys; print('bitsandbytes' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, cwd=ROOT
    )
    assert done.stdout.strip() == "False", done.stderr[-500:]

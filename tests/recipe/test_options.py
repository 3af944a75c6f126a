"""Options from presets and the command line."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

import sparse_cache.recipe.options as options_module
from sparse_cache.recipe.options import METHODS, Options, preset_names, read_options, read_preset


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit):
        read_options(arguments)
    return capsys.readouterr().err.splitlines()[-1]


def test_later_sources_override(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: tiny\nlearning_rate: 1e-6\ngroup: 4\n")
    options = read_options(["--preset", str(path), "--group", "6", "--method", "naive"])
    assert (options.group, options.learning_rate, options.budget) == (6, 1e-6, 22)
    assert (options.sparse_rollouts, options.replay, options.reject) == (True, False, "off")
    assert read_options(["--policy-options", '{"kernel_size": 3}']).policy_options == {
        "kernel_size": 3
    }
    assert read_options(["--policy_options", "{}"]).policy_options == {}
    assert read_options(["--gradient-checkpointing"]).gradient_checkpointing is True
    assert read_options(["--divide-by-std", "false"]).divide_by_std is False
    assert read_options(["--evaluate-budgets", "3", "4"]).evaluate_budgets == [3, 4]
    assert read_options(["--trackers"]).trackers == []


def test_presets_are_whole() -> None:
    assert {"tiny", "mixed"} <= set(preset_names())
    for name in preset_names():
        Options(**read_preset(name))


def test_every_part_of_a_method_can_be_switched() -> None:
    for method, parts in METHODS.items():
        options = Options(method=method)
        assert {name: getattr(options, name) for name in parts} == parts
        assert options.distill == (0.1 if method == "smd" else 0.0)
    mixed = Options(method="smd", reject="token", reweight="geometric", distill=0.0)
    assert (mixed.replay, mixed.reject, mixed.reweight, mixed.distill) == (
        True,
        "token",
        "geometric",
        0.0,
    )


def test_every_option_has_a_line_of_help() -> None:
    for option in dataclasses.fields(Options):
        assert len(option.metadata["help"]) > 5, option.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mehtod", "smd"], "option 'mehtod' is unknown; did you mean method?"),
        (["--method", "sparserl"], "method 'sparserl' is unknown; did you mean sparse_rl?"),
        (["--preset", "tinny"], "preset 'tinny' is unknown; did you mean tiny?"),
        (["--aggregation", "tokens"], "did you mean token?"),
        (["--group", "1"], "group=1 is too small"),
        (["--temperature", "0"], "temperature=0.0 must be positive"),
        (["--budget", "0"], "budget=0 must be at least 1"),
        (["--steps", "many"], "--steps: invalid int value: 'many'"),
        (["--learning-rate", "nan"], "learning_rate=nan must be positive"),
        (["--method", "dense", "--replay"], "replay=True needs rollouts under a budget"),
        (["--method", "naive", "--distill", "0.1"], "it needs replay=True"),
        (["--load-in-4bit"], "set lora_rank too"),
        (["--estimator", "online_dpo", "--micro-batch", "3"], "micro_batch=3 must be even"),
        (["--divide-by-std", "perhaps"], "'perhaps' must be true or false"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in _error(capsys, *arguments)


def test_bad_presets_say_where(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    for text, message in (
        ("budgett: 3\n", "did you mean budget?"),
        ("learning_rate: fast\n", "learning_rate='fast' must be a number"),
        ("- 1\n", "one `option: value` a line"),
        ("a: [\n", "is not YAML"),
    ):
        path.write_text(text)
        error = _error(capsys, "--preset", str(path))
        assert message in error or message in capsys.readouterr().err, error


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        *((name, 0, f"{name}=0 must be at least 1") for name in options_module._AT_LEAST_ONE),
        *((name, -1, f"{name}=-1") for name in options_module._NOT_NEGATIVE),
        *(
            (name, bad, f"{name}={bad} must be positive and finite")
            for name in options_module._POSITIVE
            for bad in (0.0, -1.0, math.inf, math.nan)
        ),
        *(
            (option.name, "zzz", f"{option.name} 'zzz' is unknown; known: ")
            for option in dataclasses.fields(Options)
            if option.metadata["choices"]
        ),
        ("clip_low", math.nan, "clip_low=nan must not be negative"),
        ("distill", math.nan, "distill=nan must not be negative"),
    ],
)
def test_every_bad_value_is_refused(name: str, bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Options(**{name: bad})


def test_every_option_can_be_given_on_the_command_line() -> None:
    for option in dataclasses.fields(Options):
        value = getattr(Options(), option.name)
        if value is None or isinstance(value, (list, dict)):
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        for flag in {f"--{option.name}", f"--{option.name.replace('_', '-')}"}:
            found = getattr(read_options([flag, text]), option.name)
            assert found == value, flag
            assert type(found) is type(value), flag


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", "'1e-6'"])
def test_numbers_of_a_preset(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"learning_rate: {text}\nmax_grad_norm: 2\nreject_above: .inf\n")
    options = read_options(["--preset", str(path)])
    assert options.learning_rate == 1e-6
    assert type(options.max_grad_norm) is float
    assert options.reject_above == math.inf


def test_precedence(tmp_path: Path) -> None:
    """Defaults, then the method's parts, `base`, the preset, the command line."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("group: 3\nprompts: 5\nsteps: 7\nmethod: sparse_rl\n")
    second.write_text(f"base: {first}\nprompts: 6\nsteps: 8\nreject: geometric\n")
    options = read_options(["--preset", str(second), "--steps=9"])
    assert (options.group, options.prompts, options.steps) == (3, 6, 9)
    assert options.epochs == Options().epochs
    # What a preset says of a part outlives another method on the command line.
    assert (options.method, options.reject, options.reweight) == (
        "sparse_rl",
        "geometric",
        "token",
    )
    options = read_options(["--method", "smd", "--preset", str(second)])
    assert (options.method, options.reject, options.reweight) == ("smd", "geometric", "off")
    assert (options.replay, options.distill) == (True, 0.1)


def test_options_do_not_share_lists() -> None:
    Options().trackers.append("wandb")
    Options().policy_options["a"] = 1
    assert Options().trackers == ["tensorboard"]
    assert Options().policy_options == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group: four", "group='four' must be a whole number"),
        ("budget: 22.5", "budget=22.5 must be a whole number"),
        ("steps: true", "steps=True must be a whole number"),
        ("learning_rate: true", "learning_rate=True must be a number"),
        ("learning_rate:", "learning_rate=None must be a number"),
        ("learning_rate: [1]", "learning_rate=[1] must be a number"),
        ("distill: x", "distill='x' must be a number"),
        ("resume: 'false'", "resume='false' must be true or false"),
        ("replay: 1", "replay=1 must be true or false"),
        ("evaluate_budgets: 5", "evaluate_budgets=5 must be a list of whole numbers"),
        ("evaluate_budgets: [a]", "evaluate_budgets=['a'] must be a list of whole numbers"),
        ("trackers: wandb", "trackers='wandb' must be a list of texts"),
        ("policy_options: abc", "policy_options='abc' must be options by name"),
        ("model: 5", "model=5 must be a text"),
    ],
)
def test_a_preset_of_other_types_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        read_preset(str(path))


def test_off_and_small_numbers_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("method: smd\nreject: off\nreweight: no\ndistill: 1e-2\n")
    options = read_options(["--preset", str(path)])
    assert (options.reject, options.reweight, options.distill) == ("off", "off", 0.01)


def test_presets_in_a_circle_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"base: {second}\n")
    second.write_text(f"base: {first}\n")
    with pytest.raises(ValueError, match=r"first\.yaml is based on itself"):
        read_preset(str(first))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"reject_below": 2.0, "reject_above": 1.0}, "reject_below=2.0 and reject_above=1.0 must"),
        ({"reject_below": math.nan}, "reject_below=nan and reject_above=inf must"),
        ({"weight_low": 3.0}, "weight_low=3.0 and weight_high=1.5 must"),
        ({"beta2": 1.0}, "beta2=1.0 must be at least 0 and below 1"),
        ({"adaptive_target": 2.0}, "adaptive_target=2.0 must lie between 0 and 1"),
        ({"adaptive_budget": True, "budget": 5000}, "budget=5000 must lie between adaptive_least"),
        ({"evaluate_budgets": [0]}, "evaluate_budgets=[0] must be at least 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Options(**bad)


@pytest.mark.parametrize("text", ["{bad", "[1]", "3"])
def test_policy_options_are_json(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert f"{text!r} must be JSON such as" in _error(capsys, "--policy-options", text)

"""Options from presets and the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

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

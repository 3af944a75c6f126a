"""`python -m sparse_cache run` on a tiny model: what it prints, and its one-sentence errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_cache.cli import main
from sparse_cache.cli.report import format_bytes

SMALL = ["--max-new-tokens", "60", "--budget", "32", "--interval", "8", "--prompt", "How many?"]


def _number(output: str, label: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.strip().startswith(label))
    return line.strip().removeprefix(label).split()


def test_the_table_holds_the_figures(tiny_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "--model", str(tiny_folder), *SMALL]) == 0
    output = capsys.readouterr().out
    assert _number(output, "new tokens") == ["60", "60"]
    # Nine bytes of prompt, and the last token is generated but not fed.
    assert _number(output, "tokens seen") == ["68", "68"]
    dense_kept, sparse_kept = _number(output, "tokens kept, at most, per layer and head")
    assert dense_kept == "68"
    assert 32 <= int(sparse_kept) < 40
    # A row is full at 40 and loses 8: at 40, 48, 56 and 64 tokens seen, in each of 3 layers.
    assert _number(output, "evictions, over all layers") == ["0", "12"]
    # 2 tensors, 3 layers, 2 heads of 8 float32 numbers: 384 bytes a token.
    assert _number(output, "KV bytes held")[:2] == format_bytes(68 * 384).split()
    assert _number(output, "KV bytes dense would hold") == ["-", *format_bytes(68 * 384).split()]
    kl = float(re.search(r"dense answer: ([\d.]+) nats", output).group(1))
    assert kl > 0


def test_a_budget_above_the_length_changes_nothing(
    tiny_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["--max-new-tokens", "30", "--budget", "128", "--prompt", "How many?"]
    assert main(["run", "--model", str(tiny_folder), *arguments]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "position by position: 100.0%" in output
    assert "0.0000 nats; same likeliest token: 100.0%" in output
    assert "Nothing was evicted" in output


def test_without_dense_there_is_no_comparison(
    tiny_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["run", "--model", str(tiny_folder), "--no-dense", *SMALL]) == 0
    output = capsys.readouterr().out
    assert "Dense:" not in output
    assert "KL" not in output
    assert _number(output, "tokens seen") == ["-", "68"]


def test_the_same_seed_samples_the_same_answer(
    tiny_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    def answer(seed: int) -> str:
        arguments = ["--temperature", "1", "--seed", str(seed), "--no-dense", *SMALL]
        assert main(["run", "--model", str(tiny_folder), *arguments]) == 0
        return capsys.readouterr().out.split("Sparse:")[1].split("new tokens")[0]

    first = answer(1)
    assert first == answer(1)
    assert first != answer(2)


def test_it_draws_a_picture(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    picture = tmp_path / "kept.png"
    arguments = ["--model", str(tiny_folder), "--no-dense", "--plot", str(picture), *SMALL]
    assert main(["run", *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--budget", "0"], "budget=0"),
        (["--budget", "1.5"], "budget=1.5"),
        (["--budget", "3"], "window + sinks"),
        (["--interval", "0"], "interval=0"),
        (["--policy", "nonsense"], "known policies: "),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--temperature", "-1"], "--temperature -1.0"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--device", "nowhere"], "--device nowhere"),
        (["--plot", "kept.txt"], "ends in .png"),
        (["--plot", "no/such/folder/kept.png"], "there is no folder"),
        (["--model", "./no-such-folder"], "there is no such folder"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.startswith("sparse-cache run: error: ")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_a_folder_that_holds_no_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["run", "--model", str(tmp_path)]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"sparse-cache run: error: --model {tmp_path} could not be loaded")


@pytest.mark.parametrize("arguments", [["run", "--budget", "many"], ["run", "--dtype", "int3"], []])
def test_what_cannot_be_read_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_process_ends_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparse_cache", "run", "--budget", "0"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "budget=0" in done.stderr

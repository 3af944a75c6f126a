"""Every snippet and command of the README and CONTRIBUTING is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def _blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _commands(document: str) -> list[list[str]]:
    lines = "".join(_blocks(document, "sh")).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_python_snippets_run(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _blocks("README.md", "python")
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block.replace(MODEL, str(tiny_folder)), "README.md", "exec"), names)
    stats = names["cache"].stats()
    assert names["output"].shape[1] == stats.tokens_seen + 1
    assert stats.tokens_kept < 128 + 32
    assert stats.evictions > 0
    assert (tmp_path / "kept.png").is_file()
    assert (tmp_path / "rollout.safetensors").is_file()
    assert (names["under_trace"] - names["dense"]).abs().max() > 0.01


def test_the_policy_of_contributing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_cache import SparseBudgetCache
    from sparse_cache.policies import base
    from tests.tiny_model import feed

    # Other tests count the policies.
    monkeypatch.setattr(base._REGISTRY, "classes", dict(base._REGISTRY.classes))
    (block,) = _blocks("CONTRIBUTING.md", "python")
    # A module of its own, as in a file: dataclasses look their module up.
    names: dict[str, Any] = {"__name__": "tests.test_readme"}
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    cache = SparseBudgetCache(
        budget=6, interval=2, window=2, sinks=1, policy="loudest-value", record=True
    )
    # Token 3 is the loudest of those that only their score can save, then 5, then 2.
    for loudness in (1, 1, 5, 9, 2, 7, 1, 1):
        states = torch.full((1, 1, 1, 4), float(loudness))
        feed(cache, states)
    held = cache.trace().kept(0, at=8)[0, 0]
    assert held.tolist() == [True, False, True, True, False, True, True, True]
    assert names["LoudestValuePolicy"](power=2.0).options() == {"power": 2.0}


def test_the_make_targets_exist() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", text))
    assert {"run", "test", "lint", "test-oldest"} <= named
    for target in sorted(named):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"make {target}: {done.stderr}"


def test_every_shell_command_is_known() -> None:
    """A command added to the documents needs a test here."""
    documented = [" ".join(words[:4]) for words in _commands("README.md")]
    documented += [" ".join(words[:4]) for words in _commands("CONTRIBUTING.md")]
    assert documented == [
        "make run",
        "make test",
        "python -m sparse_cache run",  # run below
        "make train",  # what tests/recipe does in small
        "accelerate launch -m sparse_cache.recipe.train",  # run below
        "python -m sparse_cache.recipe.train --help",  # run below
        "python -m pip install",  # what `make test-oldest` does, with another release
        "PYTHONPATH=/tmp/other-transformers python -m pytest",
    ]


def test_the_run_command_runs(tiny_folder: Path) -> None:
    command = next(words for words in _commands("README.md") if "sparse_cache" in words)
    words = [str(tiny_folder) if word == "MODEL" else word for word in command]
    assert words != command
    done = subprocess.run(
        [sys.executable, *words[1:], "--max-new-tokens", "20"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Mean KL" in done.stdout


def test_the_training_commands_run(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file.jsonl").write_text(
        "".join(f'{{"question": "{n} + 1 = ?", "answer": "{n + 1}"}}\n' for n in range(20))
    )
    launch, show_help = (words for words in _commands("README.md") if "recipe.train" in str(words))
    named = {"MODEL": str(tiny_folder), "FILE.jsonl": str(tmp_path / "file.jsonl"), "512": "12"}
    words = [named.get(word, word) for word in launch]
    assert sum(word != other for word, other in zip(words, launch, strict=True)) == 3
    small = ["--steps", "1", "--prompts", "1", "--group", "2"]
    small += ["--new-tokens", "8", "--evaluate-examples", "2"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / words[0]), *words[1:], *small, "--interval", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Held-out accuracy before and after 1 steps" in done.stdout
    assert (tmp_path / "runs" / "latest" / "final" / "model.safetensors").is_file()
    done = subprocess.run(
        [sys.executable, *show_help[1:]], capture_output=True, text=True, check=False
    )
    assert "--method" in done.stdout


def test_links_lead_somewhere() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / document).read_text()):
            assert (ROOT / target).exists(), f"{document}: {target}"

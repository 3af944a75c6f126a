"""Comparing methods: runs of their own from one start, a table and curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_cache.recipe import compare
from tests.recipe.tiny_run import save_tiny_model


@pytest.mark.slow
def test_runs_from_one_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    model = save_tiny_model(tmp_path / "model")
    small = ["--steps", "1", "--prompts", "1", "--group", "2"]
    small += ["--evaluate-examples", "3", "--new-tokens", "8"]
    arguments = ["--methods", "smd", "--vary", "distill", "0", "0.1", "--output", f"{tmp_path}/out"]
    arguments += ["--at-once", "2", "--preset", "tiny", "--model", str(model), *small]
    arguments += ["--trackers"]
    compare.main(arguments)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["method"] for row in summary["rows"]] == ["smd, distill 0", "smd, distill 0.1"]
    assert set(summary["rows"][0]["last"]) == {"dense", "budget 22", "budget 18"}
    table = (tmp_path / "out" / "summary.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("\n") == 4
    assert (tmp_path / "out" / "seed-0" / "curves.png").stat().st_size > 10_000
    # What has ended is not done again.
    monkeypatch.setattr(compare.subprocess, "run", None)
    compare.main(arguments)
    with pytest.raises(SystemExit):
        compare.main([*arguments, "--stepps", "3"])
    with pytest.raises(SystemExit, match="other options"):
        compare.main([*arguments, "--learning-rate", "1e-5"])

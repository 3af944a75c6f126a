"""The benchmarks run, and their figures have the right shape and keep to the invariants.

Times are not judged here: machines that run tests are busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_smoke_run(tmp_path: Path) -> None:
    """One test, because several processes that share the tests would each make the run."""
    _run(tmp_path)
    _check_decode_takes_whole_periods(tmp_path)
    _check_soak_stays_bounded(tmp_path)
    _check_quality_of_every_policy(tmp_path)
    _check_models_without_the_cache_are_not_changed(tmp_path)
    _check_every_kernel_is_timed(tmp_path)
    _check_replay_is_exact(tmp_path)
    _check_documents_hold_the_figures(tmp_path)


def _run(target: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--threads", "1"]
    command += ["--output", str(target / "results"), "--docs", str(target / "docs")]
    run = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def _read(folder: Path, part: str) -> dict:
    content = json.loads((folder / "results" / f"{part}.json").read_text())
    assert content["environment"]["threads"] == 1
    assert content["environment"]["packages"]["torch"] == torch.__version__
    return content


def _check_decode_takes_whole_periods(folder: Path) -> None:
    content = _read(folder, "decode")
    layers, periods = 2, 2
    assert {(row["policy"], row["batch"]) for row in content["overhead"]} == {
        (policy, batch) for policy in ("rkv", "streaming") for batch in (1, 2)
    }
    for row in content["overhead"]:
        # Every layer evicts exactly once in every period of `interval` steps, in each row or
        # in all rows at once: the count per layer is what makes the ratio fair.
        assert row["evictions_in_the_measured_steps"] % (layers * periods) == 0
        assert row["evictions_in_the_measured_steps"] > 0
        assert row["ratio"]["count"] == periods
        assert row["ratio"]["median"] > 0
    assert [row["context"] for row in content["speedup"]] == [256]
    assert all(profile["functions"] for profile in content["profiles"])


def _check_soak_stays_bounded(folder: Path) -> None:
    (run,) = _read(folder, "soak")["runs"]
    # Bytes of a token in the tiny model: keys and values, 2 layers, 2 heads of 16 float32.
    assert run["kv_bytes"] == (64 + 16) * (2 * 2 * 2 * 16 * 4)
    assert run["kv_bytes_constant"] and run["within_2_percent"] and run["bounded"]
    assert run["most_tokens_stored"] <= 64 + 16
    assert run["evictions"] > 0


def _check_quality_of_every_policy(folder: Path) -> None:
    from sparse_cache.policies import policy_names

    content = _read(folder, "quality")
    plain = [row for row in content["rows"] if row["name"] == row["policy"]]
    for kind in ("text", "chains"):
        found = {row["name"]: row for row in plain if row["kind"] == kind}
        assert set(found) == set(policy_names())
        for row in found.values():
            assert row["kl"] > 0
            assert 0 <= row["agreement"] <= 1
            low, high = row["kl_interval"]
            assert low <= row["kl"] <= high
    # 2 texts of 128 tokens, of which the first 32 + 16 come before the first eviction.
    assert {row["tokens"] for row in plain if row["kind"] == "text"} == {2 * (128 - 48)}
    worst = content["chunks_against_single_tokens"]["greatest_difference"]
    assert max(worst.values()) < 1e-4, "chunks do not give what single tokens give"


def _check_models_without_the_cache_are_not_changed(folder: Path) -> None:
    content = _read(folder, "nochange")
    for row in content["bits"]:
        assert all(row["equal_bits"].values()), row
        assert row["numbers_compared"] > 1000
    assert [row["ratio"]["count"] for row in content["times"]] == [12]


def _check_every_kernel_is_timed(folder: Path) -> None:
    content = _read(folder, "kernels")
    (step,) = content["decode"]
    assert set(step["sides"]) >= {"ours", "ours with mass", "sdpa", "sdpa with mask"}
    (event,) = content["events"]
    assert set(event["sides"]) == {
        "hole filling",
        "compaction",
        "gather and copy",
        "window importance",
        "redundancy",
    }
    for side in (*step["sides"].values(), *event["sides"].values()):
        assert side["seconds"]["count"] == 3
        assert side["seconds"]["median"] > 0
    # What nobody measured says so.
    assert all(row["computed_not_measured"] for row in content["roofline"])
    assert bool(content["roofline"]) != torch.cuda.is_available()


def _check_replay_is_exact(folder: Path) -> None:
    content = _read(folder, "replay")
    for row in content["exactness"]:
        assert row["evictions"] >= 3 * 2
        bound = 1e-4 if row["dtype"] == "float32" else 0.2
        assert row["replay_max"] < bound < row["dense_max"]
    (row,) = content["bytes"]
    # Heads of 16 float32: 4 bytes beside 2 * 16 * 4.
    assert row["file_is_equal"] and row["share"] == 4 / 128
    assert row["file_share"] < 0.6 * row["share"]
    cost = _read(folder, "replay_cost")
    assert [row["tokens"] for row in cost["attention"]] == [128, 128]
    for row in cost["attention"]:
        visible, gathered = row["visible_operations"], row["gather_operations"]
        assert visible <= gathered < 1.3 * row["dense_operations"]


@pytest.mark.slow
def test_peak_memory_of_a_side(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import replay_cost

    for way, name in (("gather", "SmolLM2-135M"), ("dense", "SmolLM2-135M"), ("chunks", "-")):
        replay_cost.main(["--peak", way, name, "64", "--threads", "1"])
        assert 0 <= float(capsys.readouterr().out) < 2000


def _check_documents_hold_the_figures(folder: Path) -> None:
    speed = (folder / "docs" / "speed.md").read_text()
    quality = (folder / "docs" / "quality.md").read_text()
    decode = _read(folder, "decode")["overhead"][0]["ratio"]["median"]
    assert f"{decode:.3f}" in speed
    for row in _read(folder, "quality")["rows"]:
        assert row["name"] in quality
        assert f"{row['kl']:.3f}" in quality
    for part, digits in (("allocation", 3), ("quantization", 4)):
        text = (folder / "docs" / f"{part}.md").read_text()
        assert all(f"{row['kl']:.{digits}f}" in text for row in _read(folder, part)["rows"])
    assert "e-0" in (folder / "docs" / "replay.md").read_text()
    for picture in ("replay.png", "speed.png", "quality.png", "soak.png", "kernels.png"):
        header = (folder / "results" / picture).read_bytes()[:8]
        assert header == b"\x89PNG\r\n\x1a\n"

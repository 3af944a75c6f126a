"""The gate itself, on small kernels with and without faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.ahead_of_time.small_kernels import bad_cases, good_cases

ROOT = Path(__file__).parents[3]


def run(module: str, folder: Path, *targets: str) -> tuple[int, str, dict, str]:
    """Exit status, output, figures and document. Tests of kernels set TRITON_INTERPRET=1, and the
    gate has to do without it by itself."""
    command = [sys.executable, "-m", "sparse_cache.kernels.ahead_of_time", "--targets", *targets]
    command += ["--operations", f"tests.kernels.ahead_of_time.{module}"]
    command += ["--json", str(folder / "k.json"), "--out", str(folder / "k.md")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (folder / "k.json").is_file(), done.stdout + done.stderr
    figures = json.loads((folder / "k.json").read_text())
    return done.returncode, done.stdout, figures, (folder / "k.md").read_text()


@pytest.mark.slow
def test_good_kernels_pass_on_every_gpu(tmp_path: Path) -> None:
    status, output, figures, document = run("good_kernels", tmp_path, "80", "90", "100")
    assert (status, figures["faults"]) == (0, []), output
    assert len(figures["builds"]) == 3 * len(good_cases())
    for build in figures["builds"]:
        assert 0 < build["registers"] <= 255
        assert build["stack_bytes"] == 0
        if build["variant"] == "loads that need not be wide":
            assert build["vectorised"] == 0.0
        else:
            assert (build["vectorised"], build["widest_load"]) == (1.0, 16)
        in_place = build["kernel"] in ("move_rows", "move_rows_of_layers")
        narrow = build["variant"] == "loads that need not be wide"
        assert build["order"] == ("right" if in_place and not narrow else None)
    shared = {
        each["target"]: each["shared_bytes"]
        for each in figures["builds"]
        if each["variant"] == "64x64"
    }
    assert min(shared.values()) >= 2 * 64 * 64 * 2
    assert "| small | move_rows | barrier | sm_100 |" in document


@pytest.mark.slow
def test_every_fault_is_said_in_a_sentence(tmp_path: Path) -> None:
    status, output, figures, document = run("bad_kernels", tmp_path, "90")
    assert status == 1
    by_variant = {build["variant"]: build for build in figures["builds"]}
    for sentence, case in bad_cases().items():
        found = by_variant[case.variant]["faults"]
        assert any(sentence in fault for fault in found), (sentence, found)
        assert f"small, {case.variant} (" in output
    assert all(fault in document for fault in figures["faults"])


def test_an_unknown_operation_is_named() -> None:
    from sparse_cache.kernels.ahead_of_time.operations import cases_of, operations

    with pytest.raises(ValueError, match="'flash' is unknown; kernels/ has "):
        cases_of("flash")
    assert set(operations()) >= {"decode_attention", "eviction", "redundancy", "window_importance"}

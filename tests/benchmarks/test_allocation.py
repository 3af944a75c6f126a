"""The comparison of allocations runs, and holds the bytes equal that it compares at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import allocation, allocation_document


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("allocation")
    arguments = ["--quick", "--variants", "--output", str(folder), "--docs", str(folder / "docs")]
    allocation.main([*arguments, "--policies", "snapkv", "h2o"])
    return folder


def test_chunks_are_equivalent_to_single_tokens(folder: Path) -> None:
    content = json.loads((folder / "allocation.json").read_text())
    worst = content["chunks_against_single_tokens"]["greatest_difference"]
    assert len(worst) == 5 * 2
    assert max(worst.values()) < 1e-4


def test_every_cell_is_measured_at_the_same_bytes(folder: Path) -> None:
    rows = json.loads((folder / "allocation.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 5  # kinds, policies, allocations
    # Bytes of a token in the tiny model: keys and values, 2 layers, 2 heads of 16 float32.
    token = 2 * 2 * 2 * 16 * 4
    for row in rows:
        texts = 2 if row["kind"] == "text" else 1
        assert row["bytes"] == texts * (32 + 16) * token
        assert row["kl"] > 0
        assert (row["minus_uniform"] is None) == (row["name"] == "uniform")
        uneven = row["fewest_tokens_of_a_head"] < row["most_tokens_of_a_head"]
        assert uneven == (row["name"] != "uniform")


def test_the_document_holds_the_figures(folder: Path) -> None:
    rows = json.loads((folder / "allocation.json").read_text())["rows"]
    text = (folder / "docs" / "allocation.md").read_text()
    for row in rows:
        assert f"| {row['policy']}, {row['name']} |" in text
        assert f"{row['kl']:.3f}" in text
    assert "hold the same bytes" in text


def row(name: str, low: float, high: float) -> dict:
    """Figures of one allocation in one cell."""
    return {
        "name": name,
        "kind": "text",
        "budget": 8,
        "policy": "rkv",
        "bytes": 64,
        "minus_uniform": {"kl": (low + high) / 2, "interval": [low, high]},
    }


def test_the_verdict_says_what_is_sure() -> None:
    text = allocation_document.verdict(
        [row("a", -0.2, -0.1), row("b", -0.2, 0.1), row("c", 0.1, 0.2)]
    )
    assert "`a` is closer to the dense model than uniform in 1 of 1" in text
    assert "closer in 1 (rkv 8 text), farther in 0 (none)" in text
    assert text.count("closer in 0 (none), farther in 0 (none)") == 1
    assert "closer in 0 (none), farther in 1 (rkv 8 text)" in text
    other = {**row("d", 0.1, 0.2), "bytes": 65}
    assert "do not all hold the same bytes" in allocation_document.verdict([row("a", 0, 1), other])

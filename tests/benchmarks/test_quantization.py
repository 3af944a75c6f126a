"""The comparison of storages runs, and its bytes and tokens are what it says they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import quantization, quantization_document
from benchmarks.models import forward, random_model
from sparse_cache import SparseBudgetCache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantization")
    arguments = ["--quick", "--output", str(folder), "--docs", str(folder / "docs")]
    quantization.main([*arguments, "--policies", "rkv", "h2o"])
    return folder


def test_chunks_are_equivalent_to_single_tokens(folder: Path) -> None:
    content = json.loads((folder / "quantization.json").read_text())
    found = content["chunks_against_single_tokens"]["policies"]
    assert set(found) == {"rkv", "h2o"}
    for each in found.values():
        assert each["greatest_difference"] < 1e-4
        assert each["kl_of_chunks"] == pytest.approx(each["kl_of_single_tokens"], rel=1e-3)


def test_every_storage_is_measured_on_the_same_tokens(folder: Path) -> None:
    rows = json.loads((folder / "quantization.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 3  # kinds, policies, storages
    # Vectors of a token in the tiny model: keys and values, 2 layers, 2 heads, of 16 numbers.
    vectors = 2 * 2 * 2
    for row in rows:
        texts, length = (2, 224) if row["kind"] == "text" else (1, 208)
        size = 16 + 4 if row["quantization"] else 16 * 4
        assert row["bytes"] == texts * (row["budget"] + 16) * vectors * size
        assert row["bytes_dense"] == texts * length * vectors * 16 * 4
        assert row["tokens"] == texts * (length - 48)
        assert row["evictions_per_row"] > 1
        assert (row["minus_base"] is None) == (row["storage"] == "float32")


def test_the_same_bytes_are_used_up_but_not_exceeded(folder: Path) -> None:
    rows = json.loads((folder / "quantization.json").read_text())["rows"]
    plain = {row["kind"]: row for row in rows if row["storage"] == "float32"}
    for row in rows:
        share = row["bytes"] / plain[row["kind"]]["bytes"]
        if row["storage"] == "int8, same bytes":
            assert 0.99 < share <= 1.0
            assert row["budget"] == (32 + 16) * 64 // 20 - 16
        elif row["storage"] == "int8, same budget":
            assert share == 20 / 64
            assert row["budget"] == 32


def test_rounding_chunks_beforehand_stores_what_the_cache_would_store() -> None:
    model, settings = random_model("tiny"), {"budget": 32, "interval": 16, "quantization": "int8"}
    tokens = torch.randint(256, (1, 60), generator=torch.Generator().manual_seed(0))
    caches = [SparseBudgetCache(**settings), quantization.RoundedChunks(**settings)]
    with torch.no_grad():
        for cache in caches:
            forward(model, tokens[:, :20], cache)
            cache.rounds = True
            for start in range(20, 60):
                forward(model, tokens[:, start : start + 1], cache)
    for first, second in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(first.held.storage["positions"], second.held.storage["positions"])
        assert torch.allclose(first.keys, second.keys, atol=1e-4)


def test_the_document_holds_the_figures(folder: Path) -> None:
    rows = json.loads((folder / "quantization.json").read_text())["rows"]
    text = (folder / "docs" / "quantization.md").read_text()
    for row in rows:
        assert f"| {row['policy']}, {row['storage']} | {row['budget']} |" in text
        assert f"{row['kl']:.4f}" in text
    assert "0.312 of the bytes, 1.00 times the budget" in text


def row(policy: str, low: float, high: float) -> list[dict]:
    """Figures of one cell: unquantized, and int8 with a quarter of the bytes."""
    shared = {"kind": "text", "policy": policy, "base_budget": 8, "budget": 8}
    change = {"kl": (low + high) / 2, "interval": [low, high]}
    return [
        {**shared, "storage": "float32", "bytes": 64, "minus_base": None},
        {**shared, "storage": "int8, same budget", "bytes": 16, "minus_base": change},
    ]


def test_the_verdict_says_what_is_sure() -> None:
    text = quantization_document.verdict(
        row("a", -0.2, -0.1) + row("b", -0.2, 0.1) + row("c", 0.1, 0.2)
    )
    assert text.startswith("- int8, same budget: 0.250 of the bytes, 1.00 times the budget; ")
    assert "KL changes by -0.1500 to +0.1500" in text
    assert "Closer to the dense model than unquantized storage in 2 of 3 cells" in text
    assert "closer in 1 (a 8 text), farther in 1 (c 8 text)" in text


def test_texts_that_are_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantization.main(["--text-tokens", "384", "--model", "tiny"])
    assert "needs texts of more than 384 tokens" in capsys.readouterr().err

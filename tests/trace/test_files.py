"""A trace in a file is the trace, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from sparse_cache import NEVER, EvictionTrace
from sparse_cache.trace import files

TRACE = EvictionTrace(
    deaths=[
        torch.tensor([[[0, 3, NEVER, 4]], [[2, NEVER, 4, NEVER]]], dtype=torch.int32),
        torch.tensor(
            [[[0, NEVER, 4, NEVER], [0, 2, 3, NEVER]], [[1, 3, 3, 4], [NEVER] * 4]],
            dtype=torch.int32,
        ),
    ],
    layer_indices=[1, 4],
    tokens_seen=4,
)


def assert_equal(one: EvictionTrace, other: EvictionTrace) -> None:
    assert one.layer_indices == other.layer_indices and one.tokens_seen == other.tokens_seen
    for mine, theirs in zip(one.deaths, other.deaths, strict=True):
        assert mine.dtype == torch.int32 and torch.equal(mine, theirs)


def test_round_trip(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.safetensors")
    assert_equal(EvictionTrace.load(tmp_path / "trace.safetensors"), TRACE)
    assert os.listdir(tmp_path) == ["trace.safetensors"]


@settings(derandomize=True, deadline=None, max_examples=10)
@given(columns=st.sampled_from([1, 100, 32766, 32767, 32768, 40000]), seed=st.integers(0, 1000))
def test_any_length(tmp_path_factory: pytest.TempPathFactory, columns: int, seed: int) -> None:
    """Also around the length up to which 16 bits are enough."""
    generator = torch.Generator().manual_seed(seed)
    column = torch.arange(columns)
    death = (
        column + 1 + (torch.rand(1, 1, columns, generator=generator) * (columns - column)).long()
    )
    death = torch.where(torch.rand(death.shape, generator=generator) < 0.3, NEVER, death).int()
    trace = EvictionTrace([death], [0], columns)
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    trace.save(path)
    assert_equal(EvictionTrace.load(path), trace)
    width = 2 if columns < 32767 else 4
    assert path.stat().st_size < columns * width + 600


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.safetensors"
    TRACE.save(path)
    before = path.read_bytes()

    def full(*arguments: object) -> None:
        Path(str(arguments[1])).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        TRACE.pad(2).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.safetensors"]


def test_an_unsound_trace_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="deaths is empty"):
        EvictionTrace([], [], 1).save(tmp_path / "trace.safetensors")
    assert not os.listdir(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no trace at"):
        EvictionTrace.load(tmp_path / "trace.safetensors")


def test_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    TRACE.save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        EvictionTrace.load(path)


def test_something_else(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="not an eviction trace"):
        EvictionTrace.load(path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        EvictionTrace.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "2"}, "version '2' of the format, this release reads up to 1; upgrade"),
        ({"version": "old"}, "version 'old'"),
        ({"layer_indices": "[1, 5]"}, "not a sound trace"),
        ({"layer_indices": "x"}, "not a sound trace"),
        ({"version": "0"}, "version '0'"),
        ({"version": "01"}, "version '01'"),
        ({"version": "\u00b2"}, "version '\u00b2'"),
        ({"version": "9" * 5000}, "version '9999"),
        ({"layer_indices": "[1.0, 4]"}, "is not a list of whole numbers"),
        ({"layer_indices": "[true, 4]"}, "is not a list of whole numbers"),
        ({"layer_indices": '{"1": 0, "4": 0}'}, "is not a list of whole numbers"),
        ({"layer_indices": "[1e400, 4]"}, "is not a list of whole numbers"),
        ({"layer_indices": "[" * 100_000}, "is not a list of whole numbers"),
        ({"layer_indices": "[4, 1]"}, "must be ascending"),
        ({"layer_indices": "[1]"}, r"layers \[1\] are not those of its tensors"),
        ({"tokens_seen": " 4 "}, "tokens_seen=' 4 ' is not a whole number"),
        ({"tokens_seen": "1_0"}, "tokens_seen='1_0'"),
        ({"tokens_seen": "9" * 5000}, "tokens_seen='9999"),
        ({"sha256": "0"}, "is not what was written"),
        ({"tokens_seen": "5"}, r"not a sound trace.*must be \[2, heads, 5\]"),
    ],
)
def test_changed(tmp_path: Path, change: dict[str, str], message: str) -> None:
    tensors = {
        f"deaths.{layer}": death
        for layer, death in zip(TRACE.layer_indices, TRACE.deaths, strict=True)
    }
    metadata = {
        "format": files.FORMAT,
        "version": "1",
        "tokens_seen": "4",
        "layer_indices": "[1, 4]",
    }
    save_file(tensors, tmp_path / "trace.safetensors", metadata | change)
    with pytest.raises(ValueError, match=message):
        EvictionTrace.load(tmp_path / "trace.safetensors")


def test_another_tensor_beside(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    TRACE.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"more": torch.zeros(1)}, path, metadata)
    with pytest.raises(ValueError, match=r"not those of its tensors .*more"):
        EvictionTrace.load(path)


def test_a_death_that_changed_into_another(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    TRACE.save(path)
    content = bytearray(path.read_bytes())
    never = content.rindex(b"\xff\x7f")
    content[never : never + 2] = b"\x04\x00"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not what was written"):
        EvictionTrace.load(path)

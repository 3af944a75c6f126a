"""Verifiers by name."""

from __future__ import annotations

import sys

import pytest

from sparse_cache.recipe.verifiers import get_verifier, verifier_names
from sparse_cache.recipe.verifiers.optional import import_optional

EXAMPLES = "tests.recipe.verifiers.examples"


def test_every_name_is_a_verifier_within_bounds() -> None:
    assert verifier_names() == ["exact", "fuzzy", "math", "rouge"]
    for package in ("math_verify", "rapidfuzz", "rouge_score"):
        pytest.importorskip(package)
    for name in verifier_names():
        assert 0.0 <= get_verifier(name)("so it is 4", "4") <= 1.0
        assert get_verifier(name)("4", "4") == 1.0


@pytest.mark.parametrize(
    ("name", "near"), [("rogue", "rouge"), ("Exact", "exact"), ("math-verify", "math")]
)
def test_an_unknown_name_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        get_verifier(name)


def test_a_name_unlike_any_gets_the_list() -> None:
    with pytest.raises(ValueError, match=r"choose exact, fuzzy, math, rouge, or package\.module"):
        get_verifier("function")
    with pytest.raises(TypeError, match="must be a name"):
        get_verifier(None)  # type: ignore[arg-type]


def test_functions_by_import_name() -> None:
    length = get_verifier(f"{EXAMPLES}:length")
    assert (length("four", 4), length("four", 5)) == (1.0, 0.0)
    assert get_verifier(f"{EXAMPLES}:Group.always")("", None) == 1.0


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (f"{EXAMPLES}:lenght", ValueError, "did you mean 'length'"),
        (f"{EXAMPLES}:Group.never", ValueError, "has no 'never'"),
        (f"{EXAMPLES}:NOT_A_FUNCTION", TypeError, "cannot be called"),
        ("no_such_package.rewards:f", ValueError, "no module 'no_such_package'.*PYTHONPATH"),
        (":f", ValueError, "must have the form"),
        ("math:", ValueError, "must have the form"),
    ],
)
def test_functions_that_are_not_there(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        get_verifier(name)


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(ImportError, match=r"verifier='fuzzy' needs rapidfuzz.*pip install"):
        import_optional("rapidfuzz", "rapidfuzz", "verifier='fuzzy'")

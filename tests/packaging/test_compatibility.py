"""The range of transformers releases is checked at import, and is the one that is declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from sparse_cache import compatibility

ROOT = Path(__file__).parents[2]


def _pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(compatibility, "installed_version", lambda: version)


def test_the_version_is_that_of_the_module() -> None:
    assert compatibility.installed_version() == transformers.__version__


@pytest.mark.parametrize("version", ["5.17.0", "5.17.3", "5.20.0", "5.24.9", "5.24.0.dev0"])
def test_supported_releases_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, version)
    assert compatibility.check_transformers() is None


@pytest.mark.parametrize("version", ["4.57.1", "5.9.0", "5.16.2", "5.25.0", "5.25.0.dev0", "6.0.0"])
def test_other_releases_are_refused_in_one_sentence(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(compatibility.OVERRIDE, raising=False)
    _pretend(monkeypatch, version)
    with pytest.raises(ImportError) as caught:
        compatibility.check_transformers()
    message = str(caught.value)
    assert version in message
    assert ">=5.17,<5.25" in message
    assert "pip install" in message
    assert "\n" not in message


def test_an_unreadable_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compatibility.OVERRIDE, raising=False)
    _pretend(monkeypatch, "unknown")
    with pytest.raises(ImportError, match="unknown"):
        compatibility.check_transformers()


def test_the_environment_variable_makes_it_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compatibility.OVERRIDE, "1")
    _pretend(monkeypatch, "5.25.0")
    with pytest.warns(RuntimeWarning, match=r"found 5\.25\.0") as caught:
        compatibility.check_transformers()
    assert len(caught) == 1


def test_the_range_is_the_declared_one() -> None:
    declared = re.search(
        r'"transformers>=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert declared is not None
    numbers = [int(number) for number in declared.groups()]
    assert (*compatibility.OLDEST, *compatibility.FIRST_UNSUPPORTED) == tuple(numbers)

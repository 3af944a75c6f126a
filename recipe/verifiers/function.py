"""Verifiers that are functions of the user's, by import name."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any


def load_function(name: str) -> Callable[[str, Any], float]:
    """The function at `package.module:function`, called as `function(completion, answer)`.

    Args:
        name: the function may lie in a class, as in `package.module:Class.function`.

    Raises:
        ValueError: the name has another form, or the module or the function does not exist.
        TypeError: what is there cannot be called.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"verifier={name!r} must have the form package.module:function.")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"verifier={name!r}: there is no module {error.name!r}; put its folder on PYTHONPATH."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            guess = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"verifier={name!r}: {module_name} has no {part!r}{guess}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(
            f"verifier={name!r} is of type {type(found).__name__}, which cannot be called; name a "
            "function of (completion, answer)."
        )
    function: Callable[[str, Any], float] = found
    return function

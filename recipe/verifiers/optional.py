"""Packages that only some verifiers and tasks need."""

from __future__ import annotations

import importlib
from typing import Any


def import_optional(module: str, package: str, needed_by: str) -> Any:
    """Import `module`.

    Args:
        module: its import name.
        package: what pip calls it.
        needed_by: what the user asked for, as in `verifier='math'`.

    Raises:
        ImportError: it cannot be imported; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs {package}, which cannot be imported ({error}): "
            f"run `pip install {package}`."
        ) from error

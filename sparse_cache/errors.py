"""The errors that users can catch by name, and warnings that are said once."""

from __future__ import annotations

import functools
import warnings


class UnsupportedModelError(ValueError):
    """A model, or a way of calling it, that cannot be served exactly under a budget.

    Raised in place of a silently wrong answer; the message says what to use instead.
    """


@functools.cache
def warn_once(message: str) -> None:
    """Warn with `message`, at most once in this process."""
    warnings.warn(message, UserWarning, stacklevel=3)

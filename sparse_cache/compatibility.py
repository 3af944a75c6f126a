"""Which releases of transformers this library works with, checked at import."""

from __future__ import annotations

import os
import warnings

OLDEST = (5, 17)
"""Oldest supported release, `(major, minor)`: the ends of the range are tested."""
FIRST_UNSUPPORTED = (5, 25)
"""First release that is not supported, because nothing has been tested with it."""
OVERRIDE = "SPARSE_CACHE_ALLOW_UNTESTED_TRANSFORMERS"
"""Environment variable: set to `1`, an unsupported release warns instead of raising."""


def check_transformers() -> None:
    """Raise unless the installed transformers is a release this library is tested with.

    Reads the version and imports nothing else of transformers.

    Raises:
        ImportError: the installed release lies outside the range. With the environment variable
            `SPARSE_CACHE_ALLOW_UNTESTED_TRANSFORMERS=1` this is a warning instead.
    """
    found = installed_version()
    if OLDEST <= _major_minor(found) < FIRST_UNSUPPORTED:
        return
    oldest, end = (".".join(map(str, bound)) for bound in (OLDEST, FIRST_UNSUPPORTED))
    message = (
        f"sparse_cache works with transformers >={oldest},<{end} but found {found}; "
        f'install a supported release with `pip install "transformers>={oldest},<{end}"`, '
        f"or set {OVERRIDE}=1 to try this one at your own risk."
    )
    if os.environ.get(OVERRIDE) == "1":
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return
    raise ImportError(message)


def installed_version() -> str:
    """The version of the transformers that `import transformers` gives."""
    from transformers import __version__

    return __version__


def _major_minor(version: str) -> tuple[int, int]:
    """`"5.25.0.dev0"` gives `(5, 25)`; something unreadable gives `(0, 0)`, which is too old."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0

"""The kernels, whose code lies in the folder `kernels/` (at the top of the repository).

That folder has no `__init__.py`, so that it is never taken for Hugging Face's package `kernels`:
see its README. A module with a `__path__` is a package all the same, and unlike a bare folder it
is found in an editable install too.
"""

from pathlib import Path

_here = Path(__file__).parent
_installed = _here / "kernels"
__path__ = [str(_installed if _installed.is_dir() else _here.parent / "kernels")]

"""Compile every kernel for the GPUs we name, on any machine, and look at what came out.

`python -m sparse_cache.kernels.ahead_of_time`; the rules are in docs/kernels.md.
"""

from .case import Case

__all__ = ["Case"]

"""Compile every kernel for the GPUs we name, on any machine, and look at what came out."""

from .case import Case

__all__ = ["Case"]

"""The command `sparse-cache`: one module a subcommand."""

from .main import main

__all__ = ["main"]

"""Reads the command line and runs a subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..embedded_model import EmbeddedModelError
from ..errors import UnsupportedModelError
from . import run
from .errors import UsageError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sparse-cache` with `arguments` (those of the process when None).

    Returns:
        The exit code: 0, 2 for a mistake of the user, 130 when interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="sparse-cache",
        description="Run language models under a fixed KV-cache budget.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run.add_parser(commands)
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except (UsageError, EmbeddedModelError, UnsupportedModelError) as error:
        print(f"sparse-cache {chosen.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as in `... | head`; python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0

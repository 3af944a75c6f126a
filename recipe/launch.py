"""Finding out that a launcher started fewer processes than it was asked for.

`accelerate launch --cpu --num_processes 2` starts ONE process, without a word, unless it is given
an MPI host file; so does `--num_processes 2` where there is one GPU or none. Accelerate's simple
launcher does not tell the process how many were asked for. It sets `MASTER_ADDR` where that was
more than one, but a user's own shell may have set it as well. The sure witness is the launcher
itself, which waits as a parent of the process: its command line has the number, or names the
configuration that has it.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser

logger = logging.getLogger(__name__)

_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where torchrun and the MPI programs say how many processes they started."""

_warned = False


def check_launch(started: int | None = None) -> None:
    """Warn, once in a process, if `accelerate launch` started one process instead of several.

    Never raises: what cannot be found out is not warned of.

    Args:
        started: processes that there are, `Accelerator().num_processes`. None: what the environment
            variables of torchrun and MPI say.
    """
    global _warned
    if _warned or (started or _started(os.environ)) > 1:
        return
    asked = _asked_of_a_parent()
    several = asked > 1 if asked is not None else _asked_for_several(os.environ)
    if several:
        _warned = True
        logger.warning(_warning(asked, sys.orig_argv[1:], os.environ))


def processes_asked_for(command: Sequence[str]) -> int | None:
    """How many processes a command line asks `accelerate launch` for.

    Args:
        command: the words of the command line.

    Returns:
        None if it is another command, or leaves the number open.

    Raises:
        OSError, ValueError: its configuration file cannot be read.
    """
    given = _arguments_of_launch(command)
    if given is None:
        return None
    options = launch_command_parser().parse_args(given)
    if options.num_processes is not None:
        return int(options.num_processes)
    # As Accelerate itself decides whether the user's own configuration counts.
    if options.config_file is None and (options.cpu or not Path(default_config_file).is_file()):
        return None
    return int(load_config_from_file(options.config_file).num_processes)


def _arguments_of_launch(command: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch` in one of its spellings."""
    words = list(command)
    # It is the program itself, or a script or module that the interpreter runs.
    after_options = (place for place, word in enumerate(words) if place and word[:1] != "-")
    for place in (0, next(after_options, 0)):
        name = Path(words[place]).name.removesuffix(".exe") if words else ""
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return words[place + 1 :]
        if name in ("accelerate", "accelerate.commands.accelerate_cli"):
            return words[place + 2 :] if words[place + 1 : place + 2] == ["launch"] else None
    return None


def _asked_of_a_parent() -> int | None:
    """Of the nearest `accelerate launch` above this process; None if there is none to be seen."""
    try:
        for parent in psutil.Process().parents():
            command = parent.cmdline()
            if _arguments_of_launch(command) is not None:
                return processes_asked_for(command)
    except (psutil.Error, OSError, ValueError):
        logger.debug("the launcher's command line could not be read", exc_info=True)
    return None


def _started(environment: Mapping[str, str]) -> int:
    return max((int(environment[name]) for name in _WORLD_SIZES if name in environment), default=1)


def _asked_for_several(environment: Mapping[str, str]) -> bool:
    """Whether Accelerate's simple launcher set up an address to meet at, and nobody to meet."""
    return "ACCELERATE_DYNAMO_BACKEND" in environment and "MASTER_ADDR" in environment


def _warning(asked: int | None, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """One sentence: what happened, and the command to use instead.

    Args:
        asked: processes, or None if only that there should have been several is known.
        command: this process's, without the interpreter.
        environment: its variables.
    """
    number = "several processes" if asked is None else f"{asked} processes"
    what = f"accelerate launch was asked for {number} but started one: "
    on_cpu = environment.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    if on_cpu or not torch.accelerator.is_available():
        again = f"torchrun --nproc_per_node {asked or 2} {shlex.join(command)}"
        return f"{what}on CPUs it needs MPI for more, so use `ACCELERATE_USE_CPU=true {again}`."
    return (
        f"{what}there are {torch.accelerator.device_count()} accelerators to be seen, so add "
        "--multi_gpu, or --config_file recipe/accelerate/ddp.yaml, and let no more be asked for "
        "than there are."
    )

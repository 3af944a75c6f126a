"""What long set-up steps show while they run: bars on a terminal, one line each elsewhere."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[float], None]
"""Called with the share of a step that is done, 0 to 1."""


class Progress:
    """Shows steps on a stream, standard error by default.

    On a terminal, with `rich` installed, a step with a known size is a bar and any other a spinner.
    Elsewhere each step is one plain line, so that a log stays readable.

    Args:
        enabled: False shows nothing.
        stream: where to write; standard error when None.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self.stream = stream

    def note(self, text: str) -> None:
        """Write one line."""
        if self.enabled:
            print(text, file=self.stream or sys.stderr, flush=True)

    @contextmanager
    def step(self, text: str, *, measured: bool = False) -> Iterator[Advance]:
        """Show `text` while the body runs; a `measured` step reports its share as it goes."""
        stream = self.stream or sys.stderr
        if not self.enabled:
            yield _ignore
            return
        if not stream.isatty() or not _have_rich():
            self.note(f"{text} ...")
            yield _ignore
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bars

        columns = [SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}")]
        if measured:
            columns += [BarColumn(), TaskProgressColumn()]
        with Bars(*columns, TimeElapsedColumn(), console=Console(file=stream)) as bars:
            task = bars.add_task(text, total=1.0 if measured else None)

            def advance(share: float) -> None:
                bars.update(task, completed=min(share, 1.0))

            yield advance
            bars.update(task, total=1.0, completed=1.0)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' own bars and notes, which would tear ours apart."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # Newer releases prefer the name `cache`, which the oldest supported one does not know.
            warnings.filterwarnings("ignore", message=".past_key_values. is deprecated")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _ignore(share: float) -> None:
    pass


def _have_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True

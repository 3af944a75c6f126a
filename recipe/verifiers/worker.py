"""The program that a `WorkerPool` starts: it answers requests, one at a time, each within a limit.

Run as a file, and not as a module of this package, whose import takes seconds and much memory.
Arguments: the file that defines `handle(request)`, and the most memory to use, in bytes.

Requests and replies are pickles, each behind its length (8 bytes, big-endian), on what were
standard input and output. A request is `(limit in seconds, request)`, a reply `(kind, value)`:
`ready`, `answered`, `late`, `failed` (with a message).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import signal
import struct
import sys
from typing import Any, BinaryIO

GRACE_S = 1.5
"""More than `KILL_AFTER_S` of worker_pool.py: killing is for the parent, while there is one."""
LENGTH = struct.Struct(">Q")


class Late(BaseException):
    """The limit has passed. Not an `Exception`, so that what is interrupted does not catch it."""


def read(source: BinaryIO) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = LENGTH.unpack(_exactly(source, LENGTH.size))
    return pickle.loads(_exactly(source, length))


def write(target: BinaryIO, message: Any) -> None:
    """Send a message.

    Raises:
        OSError: the other side is gone.
    """
    content = pickle.dumps(message)
    left = memoryview(LENGTH.pack(len(content)) + content)
    while left:
        left = left[target.write(left) :]


def _exactly(source: BinaryIO, count: int) -> bytes:
    parts = []
    while count:
        part = source.read(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _bound_memory(most: int) -> None:
    """Numbers with billions of digits are asked for. Where there are no limits, go without."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _start_clock(limit: float) -> None:
    if hasattr(signal, "setitimer"):
        # Without a handler the second one ends the process, even in the middle of C code: should
        # the parent be killed, nothing is left running.
        signal.setitimer(signal.ITIMER_VIRTUAL, limit + GRACE_S)
        signal.setitimer(signal.ITIMER_REAL, limit)


def _stop_clock() -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _on_alarm(number: int, frame: Any) -> None:
    raise Late


def _answer(handle: Any, limit: float, request: Any) -> tuple[str, Any]:
    try:
        try:
            _start_clock(limit)
            return "answered", handle(request)
        except MemoryError:
            return "late", None
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"
        finally:
            _stop_clock()
    except Late:
        return "late", None


def main(handler: str, most_memory: int) -> None:
    """Answer until the parent is gone."""
    # Ctrl-C goes to every process of the terminal; whether to end is the parent's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _on_alarm)
    source = os.fdopen(os.dup(0), "rb", buffering=0)
    target = os.fdopen(os.dup(1), "wb", buffering=0)
    # What a library prints must not end up between two replies.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        handle = runpy.run_path(handler)["handle"]
    except Exception as error:
        write(target, ("failed", f"{type(error).__name__}: {error}"))
        return
    _bound_memory(most_memory)
    write(target, ("ready", None))
    with contextlib.suppress(EOFError, OSError):
        while True:
            limit, request = read(source)
            write(target, _answer(handle, limit, request))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

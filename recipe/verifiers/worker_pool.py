"""A few processes that answer requests within a time limit, whatever thread asks.

Checking a formula or a program that a model wrote can take forever, in C code that no exception
reaches: only a process of its own can be stopped. An alarm in this process would not do either,
since signals reach the main thread alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, BinaryIO, cast

from . import worker

START_LIMIT_S = 120.0
"""Imports from a slow network disk included."""
KILL_AFTER_S = 1.0
"""A worker ends late requests itself, and goes on; one that does not is killed."""
MOST_MEMORY = 4 * 2**30


class RequestTooLong(Exception):
    """A request was not answered within the limits of time and memory."""


class RequestFailed(Exception):
    """The handler raised; the message says what."""


class _Gone(Exception):
    """The worker ended."""


class _Worker:
    """One process. Not thread-safe."""

    def __init__(self, handler: Path, most_memory: int) -> None:
        # The file's folder must not come first on sys.path, as it would if Python ran the file: a
        # module `math` lies there.
        run = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", run, worker.__file__, str(handler), str(most_memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # a process forked from this one must not send what is left in a buffer
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._ready = False

    def _exchange(self, limit: float, message: Any = None) -> tuple[str, Any]:
        """The next reply, to a message if there is one."""
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit, kill)
        timer.daemon = True
        timer.start()
        try:
            if message is not None:
                worker.write(cast(BinaryIO, self._process.stdin), message)
            reply: tuple[str, Any] = worker.read(cast(BinaryIO, self._process.stdout))
        except (OSError, EOFError) as error:
            raise (RequestTooLong if late.is_set() else _Gone)() from error
        finally:
            timer.cancel()
        return reply

    def ask(self, request: Any, limit: float) -> tuple[str, Any]:
        """The reply to a request.

        Raises:
            RequestTooLong: it was killed.
            RuntimeError: it cannot start.
            _Gone: it ended by itself.
        """
        if not self._ready:
            try:
                kind, value = self._exchange(START_LIMIT_S)
            except RequestTooLong as error:
                raise RuntimeError(
                    f"A process to check answers in did not start within {START_LIMIT_S:.0f} s."
                ) from error
            if kind != "ready":
                raise RuntimeError(f"A process to check answers in cannot start: {value}.")
            self._ready = True
        return self._exchange(limit + KILL_AFTER_S, (limit, request))

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """Processes that are started when needed and kept.

    Any number of threads may ask; as many requests as there are workers run at a time. A process
    forked from this one starts workers of its own.

    Args:
        handler: a file that defines `handle(request)`. It is run by itself, outside its package.
        limit: most seconds for a request.
        workers: most processes; default: half the processors, from 1 to 4.
        most_memory: address space of each, in bytes, where the system can bound it.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        handler: Path,
        *,
        limit: float,
        workers: int | None = None,
        most_memory: int = MOST_MEMORY,
    ) -> None:
        if not limit > 0:
            raise ValueError(f"limit={limit} must be more than 0 seconds.")
        if workers is None:
            workers = max(1, min(4, (os.cpu_count() or 1) // 2))
        if workers < 1:
            raise ValueError(f"workers={workers} must be at least 1.")
        self._handler, self.limit, self.workers = handler, limit, workers
        self._most_memory = most_memory
        self._idle: list[_Worker] = []
        self._forget()
        _pools.add(self)
        # At the latest when the program ends.
        weakref.finalize(self, _end_all, self._idle)

    def _forget(self) -> None:
        """Start anew, without ending the workers: in a forked process they are the parent's."""
        self._slots = threading.BoundedSemaphore(self.workers)
        self._lock = threading.Lock()
        self._idle.clear()

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Worker(self._handler, self._most_memory)

    def ask(self, request: Any) -> Any:
        """What `handle(request)` returns.

        Args:
            request: anything that can be pickled without this package.

        Raises:
            RequestTooLong: it took more than the limit of time or memory.
            RequestFailed: `handle` raised.
            RuntimeError: no worker can be started.
        """
        with self._slots:
            try:
                kind, value = self._ask_one(request)
            except _Gone:
                # It may have been ended while idle, by whoever needed memory. The second time it
                # is the request that ends it.
                try:
                    kind, value = self._ask_one(request)
                except _Gone as error:
                    raise RequestTooLong("A worker ended at this request.") from error
        if kind == "late":
            raise RequestTooLong(f"A request took more than {self.limit:g} s or too much memory.")
        if kind == "failed":
            raise RequestFailed(value)
        return value

    def _ask_one(self, request: Any) -> tuple[str, Any]:
        one = self._take()
        try:
            reply = one.ask(request, self.limit)
        except BaseException as error:
            one.end()
            if isinstance(error, RequestTooLong):
                # So that it is ready when next needed.
                with self._lock:
                    self._idle.append(_Worker(self._handler, self._most_memory))
            raise
        with self._lock:
            self._idle.append(one)
        return reply

    def close(self) -> None:
        """End the idle workers; the pool can still be used, and starts others."""
        with self._lock:
            _end_all(self._idle)


def _end_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_all() -> None:
    for pool in list(_pools):
        pool._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)

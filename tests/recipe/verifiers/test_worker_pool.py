"""Processes that answer within a limit, whatever the request does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparse_cache.recipe.verifiers.worker_pool import RequestFailed, RequestTooLong, WorkerPool

HANDLER = """
import collections, itertools, os, sys, time

def handle(request):
    if request == "pid":
        return os.getpid()
    if request == "print":
        print("a" * 100, flush=True)
        os.write(1, b"b" * 100)
        return "printed"
    if request == "raise":
        raise KeyError("no such thing")
    if request == "leave":
        sys.exit(3)
    if request == "sleep":
        time.sleep(60)
    if request == "stuck in C":
        collections.deque(itertools.repeat(0), maxlen=0)
    if request == "memory":
        return len(bytearray(3 * 2 ** 30))
    while request == "swallow":
        try:
            time.sleep(60)
        except BaseException:
            pass
    return request
"""
LIMIT_S = 0.2


@pytest.fixture
def handler(tmp_path: Path) -> Path:
    path = tmp_path / "handler.py"
    path.write_text(HANDLER)
    return path


@pytest.fixture
def pool(handler: Path) -> Iterator[WorkerPool]:
    made = WorkerPool(handler, limit=LIMIT_S, workers=1, most_memory=2 * 2**30)
    made.ask("start")
    yield made
    made.close()


def test_what_ends_in_time_leaves_the_worker_alive(pool: WorkerPool) -> None:
    worker = pool.ask("pid")
    assert worker != os.getpid()
    assert pool.ask("print") == "printed"
    with pytest.raises(RequestFailed, match="KeyError: 'no such thing'"):
        pool.ask("raise")
    with pytest.raises(RequestTooLong):
        pool.ask("sleep")
    if hasattr(signal, "setitimer"):
        assert pool.ask("pid") == worker


@pytest.mark.parametrize("request_", ["swallow", "stuck in C"])
def test_what_no_exception_ends_is_killed(pool: WorkerPool, request_: str) -> None:
    worker = pool.ask("pid")
    start = time.monotonic()
    with pytest.raises(RequestTooLong):
        pool.ask(request_)
    assert LIMIT_S < time.monotonic() - start < LIMIT_S + 2.5
    assert pool.ask("pid") != worker


def test_a_worker_that_ends_itself(pool: WorkerPool) -> None:
    with pytest.raises(RequestTooLong, match="ended at this request"):
        pool.ask("leave")
    assert pool.ask("after") == "after"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is bounded on Linux only")
def test_memory_is_bounded(pool: WorkerPool) -> None:
    worker = pool.ask("pid")
    with pytest.raises(RequestTooLong, match="memory"):
        pool.ask("memory")
    assert pool.ask("pid") == worker


def test_a_handler_that_cannot_start(tmp_path: Path) -> None:
    path = tmp_path / "handler.py"
    path.write_text("import no_such_package")
    with pytest.raises(RuntimeError, match=r"cannot start: ModuleNotFoundError.*no_such_package"):
        WorkerPool(path, limit=1.0).ask("start")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_run_leaves_no_worker_behind(handler: Path) -> None:
    """Not even one that is stuck where neither the end of its input nor an exception reaches it."""
    psutil = pytest.importorskip("psutil")
    read, write = os.pipe()
    run = os.fork()
    if run == 0:
        try:
            pool = WorkerPool(handler, limit=LIMIT_S, workers=1)
            os.write(write, str(pool.ask("pid")).encode())
            pool.ask("stuck in C")
        finally:
            os._exit(1)
    worker = psutil.Process(int(os.read(read, 20)))
    time.sleep(0.1)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    os.close(read)
    os.close(write)
    assert worker.is_running()
    assert psutil.wait_procs([worker], timeout=20)[1] == []

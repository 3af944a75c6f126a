"""DDP and FSDP2 under replay, in two processes on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_get_the_gradients_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.replay.distributed_worker", str(tmp_path)]
    workers = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), "\n".join(outputs)
    assert {path.name for path in tmp_path.glob("passed-*")} == {"passed-0", "passed-1"}

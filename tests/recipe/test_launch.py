"""A launch that gives one process instead of several is found out."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_cache.recipe import launch

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipe" / "accelerate"

SCRIPT = """
from sparse_cache.recipe.launch import check_launch
check_launch()
check_launch()
"""


def launched(tmp_path: Path, *command: str, **variables: str) -> str:
    """What the three lines write to stderr when they are started by a command."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # No configuration of the user's own, and none of the variables of a launcher above the tests.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ACCELERATE_") and name not in ("MASTER_ADDR", "WORLD_SIZE")
    }
    environment |= {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command, str(script), "--budget", "5 6"],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


ACCELERATE = ("accelerate.commands.accelerate_cli", "launch")


@pytest.mark.slow
def test_a_launch_on_cpu_that_starts_one_process(tmp_path: Path) -> None:
    written = launched(tmp_path, *ACCELERATE, "--cpu", "--num_processes", "2")
    assert written.count("was asked for 2 processes but started one") == 1
    again = "ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2"
    assert f"{again} {tmp_path}/script.py --budget '5 6'`" in written


@pytest.mark.slow
def test_launches_as_asked_for(tmp_path: Path) -> None:
    # A user's own MASTER_ADDR means nothing.
    written = launched(
        tmp_path, *ACCELERATE, "--cpu", "--num_processes", "1", MASTER_ADDR="127.0.0.1"
    )
    assert "asked for" not in written
    written = launched(tmp_path, "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert "asked for" not in written


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /bin/accelerate launch --cpu --num_processes 2 train.py", 2),
        ("/bin/accelerate-launch --num-processes=3 -m package --num_processes 9", 3),
        ("python -m accelerate.commands.launch --num_processes 4 train.py", 4),
        ("accelerate.exe launch --num_processes 5 train.py", 5),
        (f"accelerate launch --config_file {CONFIGS / 'ddp.yaml'} train.py", 8),
        (f"accelerate launch --config_file {CONFIGS / 'ddp.yaml'} --num_processes 2 train.py", 2),
        ("accelerate launch --cpu train.py --num_processes 2", None),
        ("accelerate config --num_processes 2", None),
        ("python train.py accelerate launch --num_processes 2", None),
        ("bash", None),
        ("", None),
    ],
)
def test_what_a_command_line_asks_for(command: str, expected: int | None) -> None:
    assert launch.processes_asked_for(command.split()) == expected


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if nothing had been warned of yet, and nobody could be seen above this process."""
    monkeypatch.setattr(launch, "_warned", False)
    monkeypatch.setattr(launch, "_asked_of_a_parent", lambda: None)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_environment_where_the_parent_cannot_be_seen(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch.check_launch()
    assert not caplog.records
    fresh.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    fresh.setenv("MASTER_ADDR", "127.0.0.1")
    launch.check_launch(started=2)
    fresh.setenv("WORLD_SIZE", "2")
    launch.check_launch()
    assert not caplog.records
    fresh.delenv("WORLD_SIZE")
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            launch.check_launch()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "accelerate launch was asked for several processes but started one"
    ]


def test_advice_where_there_are_gpus(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr("torch.accelerator.is_available", lambda: True)
    fresh.setattr("torch.accelerator.device_count", lambda: 1)
    said = launch._warning(4, ["train.py"], {"ACCELERATE_USE_CPU": "False"})
    assert "there are 1 accelerators" in said and "--multi_gpu" in said


def test_a_broken_configuration_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Parent:
        def cmdline(self) -> list[str]:
            return ["accelerate", "launch", "--config_file", "/nowhere.yaml", "train.py"]

    class Process:
        def parents(self) -> list[Parent]:
            return [Parent()]

    monkeypatch.setattr(launch, "_warned", False)
    monkeypatch.setattr(launch.psutil, "Process", Process)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    launch.check_launch(started=1)
    assert not caplog.records

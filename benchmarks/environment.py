"""What a figure was measured on: machine, versions, threads, date."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def describe_environment() -> dict[str, Any]:
    """Machine, versions, thread count and date of this run, ready for JSON.

    The load average is stated because a busy machine makes times larger and more spread.
    """
    packages = {}
    for name in ("torch", "transformers", "sparse-budget-cache"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "not installed (run from a checkout)"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": packages,
        "system": platform.platform(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in _load_average()],
        "memory_gib": _memory_gib(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def resident_bytes() -> int:
    """Resident memory of this process in bytes.

    Raises:
        RuntimeError: the system has no `/proc` and `psutil` is not installed.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        try:
            import psutil
        except ImportError:
            raise RuntimeError(
                "this system has no /proc; install psutil to measure resident memory."
            ) from None
        return int(psutil.Process().memory_info().rss)


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        pages = os.sysconf("SC_PHYS_PAGES")
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _load_average() -> tuple[float, ...]:
    try:
        return os.getloadavg()
    except (OSError, AttributeError):
        return ()

"""What a measurement was taken on: every report names it."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import ringspan._ops  # noqa: F401  the instruction set in use is the library's


def describe_host() -> dict[str, Any]:
    """Processor, cores, instruction set in use, system and versions."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "instruction_set": torch.ops.ringspan._isa(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    return _told("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def available_bytes() -> int | None:
    """Memory that the system could hand out now; None where it does not tell."""
    told = _told("/proc/meminfo", "MemAvailable")
    return None if told is None else int(told.split()[0]) * 1024


def _told(file: str, name: str) -> str | None:
    """What a file of "name: value" lines says first, None where there is no file or no such line."""
    lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    found = (line.split(":", 1)[1].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(found, None)


def stamp() -> dict[str, str | None]:
    """The date and the commit of what is measured now."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.isoformat(timespec="seconds"), "commit": commit()}


@functools.cache
def commit() -> str | None:
    """The commit of the package's sources, marked where files differ from it; None where they are in no checkout."""
    tracked = ["git", "ls-files", "--error-unmatch", Path(__file__).name]
    named = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        for command in (tracked, named):
            done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
            if done.returncode != 0:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None

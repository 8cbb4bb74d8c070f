"""What a measurement was taken on: every report names it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import ringspan._ops  # noqa: F401  the instruction set in use is the library's


def describe() -> dict[str, Any]:
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
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

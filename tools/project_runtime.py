"""Where this repository lies, for notebooks and scripts that are started in it."""

from __future__ import annotations

from pathlib import Path


def resolve_project_root() -> Path:
    """The absolute path of the repository; results of runs go to benchmarks/results/ there, which git ignores."""
    return Path(__file__).resolve().parent.parent

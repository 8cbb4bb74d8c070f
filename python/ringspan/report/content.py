"""What a folder holds, in the order in which a reader wants it: failures first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringspan.bench.result import faults_of

# Far above any real result; a larger file is something else.
_MAX_FILE_BYTES = 32 << 20


@dataclass(frozen=True)
class Loaded:
    """A valid result and the name of its file."""

    file: str
    result: dict[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the run came to a bad end."""
        return self.result["failure"] is not None


@dataclass(frozen=True)
class Folder:
    """All JSON files of a folder: `runs` in reading order, and the others with what is wrong with them."""

    runs: list[Loaded]
    rejected: list[tuple[str, str]]


def load(folder: Path) -> Folder:
    """Reads every *.json of `folder`, not of folders in it. Files that are no results never raise."""
    runs, rejected = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            runs.append(Loaded(path.name, _read(path)))
        except (OSError, ValueError, RecursionError) as error:
            rejected.append((path.name, str(error)))
    return Folder(sorted(runs, key=_place), rejected)


def table_of(runs: list[Loaded]) -> list[dict[str, Any]]:
    """One row for each run and path; one without path for a run that measured none. Numbers, None where unknown."""
    rows = []
    for run in runs:
        paths = run.result["metrics"]["paths"] or {None: None}
        rows += [_row(run, name, path) for name, path in paths.items()]
    return rows


def describe_workload(workload: dict[str, Any]) -> str:
    """The sizes of a workload in one line."""
    heads = str(workload["num_heads"])
    if workload["kv_heads"] != workload["num_heads"]:
        heads += f"/{workload['kv_heads']}"
    passes = "forward and backward" if workload["backward"] else "forward"
    return (
        f"S{workload['seq_len']} H{heads} D{workload['head_dim']} {workload['dtype']} {workload['mask']} "
        f"{workload['shard_map']} {passes}"
    )


def threads_of(hardware: dict[str, Any]) -> str:
    """How many threads each rank had."""
    count = hardware["threads_per_rank"]
    return f"{count} thread{'' if count == 1 else 's'} per rank"


def _read(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise ValueError(f"{size} bytes, at most {_MAX_FILE_BYTES} are read")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error
    faults = faults_of(content)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(f"no result of the benchmark: {faults[0]}{more}")
    return content


def _place(run: Loaded) -> tuple:
    workload, hardware = run.result["workload"], run.result["hardware"]
    sizes = (workload["seq_len"], hardware["ranks"], describe_workload(workload))
    return not run.failed, workload["id"], *sizes, run.result["run"]["label"], run.file


def _row(run: Loaded, name: str | None, path: dict[str, Any] | None) -> dict[str, Any]:
    result, path = run.result, path or {}
    time, exposed = path.get("time_ms") or {}, path.get("exposed") or {}
    counts = path.get("bytes") or {}
    return {
        "file": run.file,
        "label": result["run"]["label"],
        "workload": result["workload"]["id"],
        "sizes": describe_workload(result["workload"]),
        "ranks": result["hardware"]["ranks"],
        "path": name,
        "median_ms": time.get("median"),
        "p10_ms": time.get("p10"),
        "p90_ms": time.get("p90"),
        "tokens_per_s": path.get("tokens_per_s"),
        "max_abs_error": path.get("max_abs_error"),
        "bytes_ledger": counts.get("ledger"),
        "bytes_counted": counts.get("counted"),
        "exposed_ms": exposed.get("ms"),
        "exposed_share": exposed.get("share"),
        "overlap_share": path.get("overlap_share"),
        "evidence_level": result["evidence_level"],
        "decision": result["decision"]["value"],
        "failed": run.failed,
    }

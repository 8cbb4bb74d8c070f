"""The result file: how it begins, who may write it, and what makes it valid. docs/benchmark.md describes its fields."""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import torch

from ringspan.bench.config import Config
from ringspan.bench.files import write_json
from ringspan.bench.host import describe_host, stamp

SCHEMA_VERSION = 1
_WORKLOAD = ("seq_len", "num_heads", "kv_heads", "head_dim", "dtype", "mask", "backward", "warmup", "repeats", "seed")
_FOLDER = Path(__file__).resolve().parent


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a result file."""
    return json.loads((_FOLDER / "result.schema.json").read_text(encoding="utf-8"))


def faults_of(result: Any) -> list[str]:
    """What is wrong with `result` by the schema, one line for each fault; empty if it is valid."""
    validator = jsonschema.Draft202012Validator(schema())
    errors = sorted(validator.iter_errors(result), key=lambda error: [str(part) for part in error.absolute_path])
    return [f"{error.json_path}: {_shorten(error.message)}" for error in errors]


def check_free(path: Path, label: str, force: bool) -> None:
    """Raises ValueError unless a run of `label` may write `path`; both labels are named.

    A file of another label is never replaced, nor one that no run wrote; one of the same label only with `force`.
    """
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder; give a file")
    if not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"--output {path} cannot be made, because {folder} is not a folder that can be written")
        return
    held = _run_in(path).get("label")
    if held is None:
        raise ValueError(f"--output {path} exists and is no result of this benchmark; give another file")
    if held != label:
        raise ValueError(f"--output {path} holds the run {held!r}, this run is {label!r}; give another file")
    if not force:
        raise ValueError(f"--output {path} holds a run of the same label {held!r}; give --force to replace it")


def run_id_in(path: Path) -> str | None:
    """The id of the run that wrote `path`; None if there is none."""
    return _run_in(path).get("id")


def write_result(path: Path, result: dict[str, Any], force: bool) -> None:
    """Writes `result`, whole or not at all. ValueError if it breaks the schema or must not be written there."""
    faults = faults_of(result)
    if faults:
        raise ValueError("the result does not follow its schema: " + "; ".join(faults))
    check_free(path, result["run"]["label"], force)
    write_json(path, result)


def begin_result(config: Config, arguments: Sequence[str], run_id: str) -> dict[str, Any]:
    """A result in which nothing is known yet but what was asked for, and on which machine."""
    smap = config.shard_map()
    workload = {"id": config.workload_id, "mode": config.mode} | {name: getattr(config, name) for name in _WORKLOAD}
    workload["shard_map"] = config.shard
    workload["schedules"] = ["ring", *config.schedules]
    workload["local_rows"] = [smap.local_rows(rank) for rank in range(config.world)]
    on_device = config.backend == "nccl"
    hardware = describe_host() | {
        "backend": config.backend,
        "ranks": config.world,
        "threads_per_rank": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(config.local_rank) if on_device else "cpu",
    }
    run = {
        "label": config.run_label,
        "id": run_id,
        "command": command_of(config, arguments),
    } | stamp()
    return {
        "schema_version": SCHEMA_VERSION,
        "workload": workload,
        "hardware": hardware,
        "preflight": [],
        "metrics": {},
        "evidence_level": "dry_run",
        "failure": None,
        "decision": {},
        "run": run,
    }


def command_of(config: Config, arguments: Sequence[str]) -> str:
    """The command that runs this again."""
    start = ["python", "-m", "ringspan.bench"]
    if config.world > 1 and not config.dry_run:
        start = ["torchrun", "--standalone", "--nproc_per_node", str(config.world), "-m", "ringspan.bench"]
    return shlex.join([*start, *arguments])


def _run_in(path: Path) -> dict[str, Any]:
    """The entry `run` of a file, empty where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    run = content.get("run") if isinstance(content, dict) else None
    return run if isinstance(run, dict) else {}


def _shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + "..."

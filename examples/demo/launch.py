"""Starts the processes of a run, passes on what they report, and ends all of them when one fails or hangs."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from config import RunConfig

# What a rank tells: ("step", rank, {...}), once ("done", rank, {...}) or ("failed", rank, {...}).
Report = tuple[str, int, dict[str, Any]]


class RunFailed(RuntimeError):
    """A rank failed, ended too early or hung. The message says which and why."""


@dataclass
class RunResult:
    """Losses and seconds of each step (rank 0's), and what every rank reported at its end."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)


def launch(config: RunConfig, on_step: Callable[[RunResult], None], silence_limit_s: float = 180.0) -> RunResult:
    """Runs `config` in `config.world` fresh processes. `on_step` is called whenever rank 0 has finished a step.

    Raises RunFailed where a rank fails, or where no rank says anything for `silence_limit_s`.
    """
    # Read when the process starts, before anything there could ask for another number.
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    context = mp.get_context("spawn")
    reports = context.Queue()
    # The parent keeps the store, so that it has a free port before any rank starts.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_enter, args=(rank, config, store.port, reports), daemon=True)
        for rank in range(config.world)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, reports, on_step, silence_limit_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _enter(rank: int, config: RunConfig, port: int, reports: mp.Queue) -> None:
    from worker import run_rank

    _end_with_parent()
    try:
        run_rank(rank, config, port, reports.put)
    except BaseException:
        reports.put(("failed", rank, {"traceback": traceback.format_exc()}))
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """A parent that is killed ends nobody: Linux can be asked to."""
    pr_set_pdeathsig = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:
        prctl(pr_set_pdeathsig, signal.SIGKILL)


def _collect(
    processes: list[mp.Process], reports: mp.Queue, on_step: Callable[[RunResult], None], silence_limit_s: float
) -> RunResult:
    result = RunResult()
    last_word = time.monotonic()
    while len(result.ranks) < len(processes):
        try:
            kind, rank, content = reports.get(timeout=0.5)
        except queue.Empty:
            _check_alive(processes, result, time.monotonic() - last_word, silence_limit_s)
            continue
        last_word = time.monotonic()
        if kind == "failed":
            raise RunFailed(f"rank {rank} of {len(processes)} failed:\n{content['traceback']}")
        if kind == "done":
            result.ranks[rank] = content
        elif rank == 0:
            result.losses.append(content["loss"])
            result.seconds.append(content["seconds"])
            on_step(result)
    for process in processes:
        process.join(timeout=30)
    return result


def _check_alive(processes: list[mp.Process], result: RunResult, silent_s: float, silence_limit_s: float) -> None:
    # A rank that put its last report a moment ago has ended with 0: only other codes are failures.
    for rank, process in enumerate(processes):
        if rank not in result.ranks and process.exitcode not in (None, 0):
            raise RunFailed(f"rank {rank} of {len(processes)} ended with code {process.exitcode} and without a word")
    if silent_s > silence_limit_s:
        missing = [rank for rank in range(len(processes)) if rank not in result.ranks]
        raise RunFailed(f"no word from ranks {missing} for {silent_s:.0f} s; they were ended")

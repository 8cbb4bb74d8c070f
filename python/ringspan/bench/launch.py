"""Ranks for a measurement: the processes of torchrun where it started this one, else processes of our own on gloo."""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_SILENCE_LIMIT_S = 180.0

# Called on every rank of a group in the same order; what rank 0 yields is what the caller gets.
Worker = Callable[[dist.ProcessGroup, Any], Iterator[Any]]


class RankFailed(RuntimeError):
    """A rank failed, ended too early or hung."""


def is_under_torchrun() -> bool:
    """Whether torchrun, or whatever sets its variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_group() -> dist.ProcessGroup:
    """The group of all ranks, once there is one."""
    group = dist.group.WORLD
    assert group is not None
    return group


def run_here(worker: Worker, argument: Any, backend: str) -> list[Any]:
    """Runs `worker` as one of torchrun's ranks; returns what it yielded, on every rank."""
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=_SILENCE_LIMIT_S))
    try:
        return list(worker(world_group(), argument))
    finally:
        dist.destroy_process_group()


def run_on_processes(world: int, worker: Worker, argument: Any) -> Iterator[Any]:
    """Runs `worker` on `world` processes of one thread each, and yields what rank 0 yields as it comes.

    The processes are gone when this ends, whatever happens. RankFailed: one raised, ended, or said nothing for three
    minutes.
    """
    context = mp.get_context("spawn")
    reports = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_enter, args=(rank, world, store.port, worker, argument, reports), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        yield from _collect(processes, reports)
        for process in processes:
            process.join(timeout=20)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(processes: Sequence[Any], reports: mp.Queue) -> Iterator[Any]:
    last_word = time.monotonic()
    while True:
        try:
            kind, value = reports.get(timeout=0.5)
        except queue.Empty:
            codes = [process.exitcode for process in processes]
            if any(code not in (None, 0) for code in codes):
                raise RankFailed(f"the ranks ended with codes {codes} and without a word") from None
            if time.monotonic() - last_word > _SILENCE_LIMIT_S:
                raise RankFailed(f"no word from the ranks for {_SILENCE_LIMIT_S:.0f} s; they were ended") from None
            continue
        last_word = time.monotonic()
        if kind == "failed":
            raise RankFailed(value)
        if kind == "done":
            return
        yield value


def _enter(rank: int, world: int, port: int, worker: Worker, argument: Any, reports: mp.Queue) -> None:
    try:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=_SILENCE_LIMIT_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        for value in worker(world_group(), argument):
            if rank == 0:
                reports.put(("value", value))
        dist.barrier()
        if rank == 0:
            reports.put(("done", None))
        dist.destroy_process_group()
    except BaseException:
        reports.put(("failed", f"rank {rank} failed:\n{traceback.format_exc()}"))
        raise SystemExit(1) from None

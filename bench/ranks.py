"""Two real processes for the rows that need them: started once, ended whatever happens."""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from session import end_with_parent
from settings import Settings

WORLD = 2
_SILENCE_LIMIT_S = 120.0


class RankFailed(RuntimeError):
    """A rank failed, ended too early or hung."""


def run_on_ranks(selected: list[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields what rank 0 reports for each row of `selected`, which all ranks work through in this order."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    reports = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_enter, args=(rank, store.port, selected, settings, reports), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    try:
        yield from _collect(processes, reports, len(selected))
        for process in processes:
            process.join(timeout=20)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(processes: list[mp.Process], reports: mp.Queue, count: int) -> Iterator[dict[str, Any]]:
    last_word = time.monotonic()
    while count > 0:
        try:
            report = reports.get(timeout=0.5)
        except queue.Empty:
            codes = [process.exitcode for process in processes]
            if any(code not in (None, 0) for code in codes):
                raise RankFailed(f"the ranks ended with codes {codes} and without a word") from None
            if time.monotonic() - last_word > _SILENCE_LIMIT_S:
                raise RankFailed(f"no word from the ranks for {_SILENCE_LIMIT_S:.0f} s; they were ended") from None
            continue
        last_word = time.monotonic()
        if "failed" in report:
            raise RankFailed(report["failed"])
        count -= 1
        yield report


def _enter(rank: int, port: int, selected: list[str], settings: Settings, reports: mp.Queue) -> None:
    import torch
    from ring_worker import RingWorker

    end_with_parent()
    try:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=_SILENCE_LIMIT_S)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout)
        worker = RingWorker(rank, WORLD, settings)
        for name in selected:
            result = worker.run(name)
            if rank == 0:
                reports.put({"name": name, **result})
        dist.destroy_process_group()
    except BaseException:
        reports.put({"failed": f"rank {rank} failed:\n{traceback.format_exc()}"})
        raise SystemExit(1) from None

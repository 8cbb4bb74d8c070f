"""Ranks that are threads of this one process, for groups that processes would make costly: a program of its own.

    python thread_ranks.py many 65      gloo over a HashStore
    python thread_ranks.py without 3    PyTorch's threaded group, which has no store

Prints what each rank saw, as JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs

WATCHDOG_S = 60
DEADLINE_S, LATE_S = 1.0, 2.5


def gloo_group(store: dist.Store, rank: int, world: int) -> dist.ProcessGroup:
    """A group under a name of this rank's own."""
    timeout = datetime.timedelta(seconds=30)
    group = dist.ProcessGroup(store, rank, world)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, world, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(f"rank {rank}")
    torch._C._distributed_c10d._register_process_group(f"rank {rank}", group)
    return group


def seen(call: Callable[[], Any]) -> dict[str, Any]:
    """What was raised, and after how long."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begin}
    return {"kind": None, "message": "", "seconds": time.monotonic() - begin}


def one_is_absent(rank: int, world: int, store: dist.Store, meet: threading.Barrier) -> list[Any]:
    """Good calls of a large group; then the last rank comes too late, and all make another call."""
    group = gloo_group(dist.PrefixStore("many", store), rank, world)
    losses, valid = torch.full((3,), float(rank)), torch.ones(3, dtype=torch.bool)

    def loss(**options: Any) -> float:
        return float(rs.masked_mean_loss(losses, valid, group=group, **options)[1])

    found: list[Any] = [loss()]
    found.append(seen(lambda: loss(averaged_by=2 if rank == 1 else 1)))
    found.append(seen(lambda: loss(averaged_by="two" if rank == 1 else 1)))
    rs.set_deadline(DEADLINE_S)
    meet.wait()
    if rank == world - 1:
        time.sleep(LATE_S)
    return [*found, seen(loss), seen(loss)]


def without_a_store(rank: int, world: int, store: dist.Store, meet: threading.Barrier) -> list[Any]:
    """Calls of a group that can be asked for nothing: good ones, one that differs, one that is refused."""
    dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
    group = dist.group.WORLD
    smap = rs.ShardMap.contiguous(4 * world, world)
    x = torch.full((1, 2, 4, 8), float(rank))

    def attend(**options: Any) -> torch.Tensor:
        return rs.attention(x, x, x, mask=rs.full(), shard_map=smap, group=group, **options)

    # All scores of a row but for the rank's factor are alike: weights by the keys' ranks.
    scores = torch.tensor([8**0.5 * rank * other for other in range(world)], dtype=torch.float64)
    right = float((scores.softmax(0) * torch.arange(world)).sum())
    found: list[Any] = [max(float((attend(exchange=how) - right).abs().max()) for how in ("all_to_all", "all_gather"))]
    found.append(seen(lambda: attend(scale=0.5 if rank == 1 else 0.25)))
    found.append(seen(lambda: attend(scale=float("nan") if rank == 1 else 0.25)))
    found.append(float((attend() - right).abs().max()))
    found.append(sorted({(entry.number, entry.kind) for entry in rs.flight_record()}))
    return found


def main(what: str, world: int) -> None:
    """Runs all ranks and prints a list by rank; what a rank has raised stands in its place."""
    torch.set_num_threads(1)
    run = {"many": one_is_absent, "without": without_a_store}[what]
    if what == "without":
        from torch.testing._internal.distributed import multi_threaded_pg

        multi_threaded_pg._install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, meet = dist.HashStore(), threading.Barrier(world)
    found: list[Any] = [None] * world

    def live(rank: int) -> None:
        try:
            found[rank] = run(rank, world, store, meet)
        except Exception as error:
            found[rank] = f"{type(error).__name__}: {error}"
            meet.abort()

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + WATCHDOG_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of ranks that hang would keep the process


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

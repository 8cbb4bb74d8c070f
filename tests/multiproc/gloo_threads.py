"""gloo with one worker thread: two can corrupt the memory of whatever is tested (docs/gloo-race.md)."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

WORKER = "pt_gloo_runloop"
_GLOO = dist.ProcessGroupGloo


class _OfGloo(type(_GLOO)):
    """A group that C++ hands out again is one of PyTorch's own class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _GLOO)


class OneThread(_GLOO, metaclass=_OfGloo):
    """What PyTorch makes for the backend "gloo", with its own arguments, but for the number of threads."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        options: dist.ProcessGroupGloo._Options | datetime.timedelta | None = None,
        timeout: datetime.timedelta = dist.default_pg_timeout,
    ) -> None:
        if not isinstance(options, _GLOO._Options):
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
            made = _GLOO._Options()
            made._timeout = options or timeout
            made._devices = [_GLOO.create_device(interface=one) for one in interfaces.split(",") if one] or [
                _GLOO.create_default_device()
            ]
            options = made
        options._threads = 1
        super().__init__(store, rank, size, options)


def use_one_thread() -> None:
    """From now on every group of gloo in this process has one worker thread.

    In place of the class, because neither init_process_group nor new_group hands options on to gloo.
    """
    dist.ProcessGroupGloo = distributed_c10d.ProcessGroupGloo = OneThread


def count_worker_threads() -> int:
    """Those of all groups of this process, by the name that PyTorch gives them."""
    return sum(task.joinpath("comm").read_text().strip() == WORKER for task in Path("/proc/self/task").iterdir())


def threads_and_groups(group: dist.ProcessGroup, fresh: dist.ProcessGroup) -> tuple[int, int, list[int]]:
    """A job: worker threads of the process, groups that it belongs to, and the threads that the options of two say."""
    backends = [one._get_backend(torch.device("cpu")) for one in (group, fresh)]
    groups = len(distributed_c10d._world.pg_map)
    deadline = time.monotonic() + 10
    while count_worker_threads() < groups and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)  # a thread has its name a moment after it begins
    return count_worker_threads(), groups, [one.options._threads for one in backends]

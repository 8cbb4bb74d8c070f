"""Two real processes for the rows that need them: started once, ended whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from ringspan.fit import launch
from session import end_with_parent
from settings import Settings

WORLD = 2


def run_on_ranks(selected: list[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields what rank 0 reports for each row of `selected`, which all ranks work through in this order."""
    os.environ["OMP_NUM_THREADS"] = "1"
    yield from launch.run_on_processes(WORLD, _work, (selected, settings))


def _work(group: dist.ProcessGroup, argument: tuple[list[str], Settings]) -> Iterator[dict[str, Any]]:
    from ring_worker import RingWorker

    end_with_parent()
    selected, settings = argument
    worker = RingWorker(dist.get_rank(group), WORLD, settings)
    for name in selected:
        yield {"name": name, **worker.run(name)}

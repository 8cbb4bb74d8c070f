"""Rows that two processes of one thread each run together.

ring/...       our ring by all_to_all and by p2p, our single process with two threads, and PyTorch's ring, in turns
schedules/...  every schedule that two ranks can follow, by all_to_all and some by p2p, in turns with the ring
agreement/...  what it costs that the ranks compare their calls before anything is sent
memory/...     memory of a rank beyond inputs and outputs
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from ring_cases import DIRECTIONS, ring_cases, schedule_cases
from ringspan.bench.launch import run_on_processes
from settings import Settings

WORLD = 2


def names(settings: Settings) -> list[str]:
    """All rows."""
    agreement = [f"agreement/{exchange}" for exchange in ("all_to_all", "p2p")]
    memory = [f"memory/{exchange}/{direction}" for exchange in ("all_to_all", "p2p") for direction in DIRECTIONS]
    return [*ring_cases(settings), *schedule_cases(settings), *agreement, *memory]


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Starts the ranks if there is anything for them, and yields each row's result."""
    if selected:
        # Late: PyTorch's ring, which only the ranks need, takes seconds to import.
        from ring_worker import work

        os.environ["OMP_NUM_THREADS"] = "1"  # read when a process starts
        yield from run_on_processes(WORLD, work, (list(selected), settings))

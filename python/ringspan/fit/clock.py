"""Times of calls that all ranks make together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Clock:
    """Seconds from a barrier until the last rank is done, the same on every rank. All methods are collectives."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device

    def seconds(self, run: Callable[[], Any]) -> float:
        """Of one call."""
        return self.seconds_each([run])[0]

    def seconds_each(self, runs: Sequence[Callable[[], Any]]) -> list[float]:
        """Of parts that follow each other without a barrier between them: each from the end of the one before."""
        dist.barrier(self.group)
        marks = [time.perf_counter()]
        for run in runs:
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            marks.append(time.perf_counter())
        spans = torch.tensor([end - marks[0] for end in marks[1:]], dtype=torch.float64).to(self.device)
        dist.all_reduce(spans, dist.ReduceOp.MAX, self.group)
        ends = [0.0, *spans.tolist()]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def shortest(self, run: Callable[[], Any], repeats: int) -> float:
        """The least of several calls, which whatever else the machine does disturbs least; one call warms up."""
        run()
        return min(self.seconds(run) for _ in range(repeats))

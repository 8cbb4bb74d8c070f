"""The timer of every measurement: of one process, and of ranks that make a call together.

A time runs from a barrier until the last rank is done, and is the same on every rank:

    rank 0   |==============|
    rank 1   |===================|     the time is that of rank 1
             barrier

What is compared takes turns: in a round each side runs once, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ringspan.bench.ranks import Alone, Ranks

Side = Callable[[], Any]


class Clock:
    """Seconds of calls. Where there are ranks, all of them call everything here in the same order."""

    def __init__(self, ranks: Ranks | Alone | None = None) -> None:
        self.ranks = Alone() if ranks is None else ranks

    def call(self, run: Side) -> tuple[Any, float]:
        """This rank's result, and the seconds."""
        self.ranks.barrier()
        begin = time.perf_counter()
        result = run()
        self.ranks.synchronize()
        return result, self.ranks.slowest([time.perf_counter() - begin])[0]

    def seconds(self, run: Side) -> float:
        """Of one call."""
        return self.call(run)[1]

    def parts(self, runs: Sequence[Side]) -> list[float]:
        """Of parts that follow each other without a barrier between them: each from the end of the one before."""
        self.ranks.barrier()
        marks = [time.perf_counter()]
        for run in runs:
            run()
            self.ranks.synchronize()
            marks.append(time.perf_counter())
        ends = [0.0, *self.ranks.slowest([end - marks[0] for end in marks[1:]])]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def samples(self, run: Side, repeats: int) -> list[float]:
        """Of several calls, in order, after one that warms up."""
        self.seconds(run)
        return [self.seconds(run) for _ in range(repeats)]

    def shortest(self, run: Side, repeats: int) -> float:
        """The least of several calls, which whatever else the machine does disturbs least."""
        return min(self.samples(run, repeats))

    def in_turns(self, sides: Mapping[str, Side], rounds: Iterable[int]) -> Iterator[tuple[str, float]]:
        """The name of a side and the seconds of one call of it, round by round."""
        for _ in rounds:
            for name, run in sides.items():
                yield name, self.seconds(run)

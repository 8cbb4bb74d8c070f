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

# A side that took longer than this in its first call is not called again: its row would take minutes.
SLOW_S = 5.0
LEAST_ROUNDS, MOST_ROUNDS = 2, 60

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

    def median(self, run: Side, repeats: int) -> float:
        """The middle one of several calls."""
        return sorted(self.samples(run, repeats))[repeats // 2]

    def first_calls(self, sides: Mapping[str, Side]) -> tuple[dict[str, Any], dict[str, float]]:
        """Each side's result, to be checked, and the seconds of that first call."""
        calls = {name: self.call(run) for name, run in sides.items()}
        return {name: one[0] for name, one in calls.items()}, {name: one[1] for name, one in calls.items()}

    def in_turns(self, sides: Mapping[str, Side], rounds: Iterable[int]) -> Iterator[tuple[str, float]]:
        """The name of a side and the seconds of one call of it, round by round."""
        for _ in rounds:
            for name, run in sides.items():
                yield name, self.seconds(run)

    def shortest_in_turns(
        self, sides: Mapping[str, Side], first: Mapping[str, float], budget_s: float, most_rounds: int = MOST_ROUNDS
    ) -> dict[str, float]:
        """The shortest seconds of each side, first calls included, in as many rounds as the budget allows.

        `first`: seconds of the first calls (`first_calls`); a side that is not there is called in every round.
        """
        shortest = {name: first.get(name, float("inf")) for name in sides}
        repeated = {name: run for name, run in sides.items() if first.get(name, 0.0) <= SLOW_S}
        for name, seconds in self.in_turns(repeated, self._rounds_within(budget_s, most_rounds)):
            shortest[name] = min(shortest[name], seconds)
        return shortest

    def _rounds_within(self, budget_s: float, most: int) -> Iterator[int]:
        end = time.perf_counter() + budget_s
        for done in range(most):
            # The clocks of ranks differ; a round that one of them begins, all of them run.
            is_time_left = self.ranks.slowest([float(time.perf_counter() <= end)])[0] > 0
            if done >= LEAST_ROUNDS and not is_time_left:
                return
            yield done

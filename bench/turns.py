"""Sides of a row by turns: a first call of each to be checked, then as many rounds as the budget allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ringspan.bench.clock import Clock, Side

# A side that took longer than this in its first call is not called again: its row would take minutes.
_SLOW_S = 5.0
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 60


def median_of(clock: Clock, run: Side, repeats: int) -> float:
    """The middle one of several calls."""
    return sorted(clock.samples(run, repeats))[repeats // 2]


def first_calls(clock: Clock, sides: Mapping[str, Side]) -> tuple[dict[str, Any], dict[str, float]]:
    """Each side's result, to be checked, and the seconds of that first call."""
    calls = {name: clock.call(run) for name, run in sides.items()}
    return {name: one[0] for name, one in calls.items()}, {name: one[1] for name, one in calls.items()}


def shortest_in_turns(
    clock: Clock,
    sides: Mapping[str, Side],
    first: Mapping[str, float],
    budget_s: float,
    most_rounds: int = _MOST_ROUNDS,
) -> dict[str, float]:
    """The shortest seconds of each side, first calls included, in as many rounds as the budget allows.

    `first`: seconds of the first calls (`first_calls`); a side that is not there is called in every round.
    """
    shortest = {name: first.get(name, float("inf")) for name in sides}
    repeated = {name: run for name, run in sides.items() if first.get(name, 0.0) <= _SLOW_S}
    for name, seconds in clock.in_turns(repeated, _rounds_within(clock, budget_s, most_rounds)):
        shortest[name] = min(shortest[name], seconds)
    return shortest


def _rounds_within(clock: Clock, budget_s: float, most: int) -> Iterator[int]:
    end = time.perf_counter() + budget_s
    for done in range(most):
        # The clocks of ranks differ; a round that one of them begins, all of them run.
        is_time_left = clock.ranks.slowest([float(time.perf_counter() <= end)])[0] > 0
        if done >= _LEAST_ROUNDS and not is_time_left:
            return
        yield done

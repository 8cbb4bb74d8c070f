"""Times several ways of doing one thing, in turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

# A side that took longer than this in its first call is not called again: its row would take minutes.
SLOW_S = 5.0
MIN_ROUNDS, MAX_ROUNDS = 2, 60

Side = Callable[[], Any]


def run_first(sides: Mapping[str, Side]) -> tuple[dict[str, Any], dict[str, float]]:
    """Each side's result, to be checked, and the seconds of that first call."""
    results, seconds = {}, {}
    for name, run in sides.items():
        begin = time.perf_counter()
        results[name] = run()
        seconds[name] = time.perf_counter() - begin
    return results, seconds


def time_in_turns(
    sides: Mapping[str, Side], first: Mapping[str, float], budget_s: float, most_rounds: int = MAX_ROUNDS
) -> dict[str, float]:
    """The shortest seconds of each side, first calls included; in a round every side runs once.

    `first`: seconds of the first calls (`run_first`); a side that is not there is called in every round.
    """
    shortest = {name: first.get(name, float("inf")) for name in sides}
    repeated = {name: run for name, run in sides.items() if first.get(name, 0.0) <= SLOW_S}
    end = time.perf_counter() + budget_s
    for done in range(most_rounds):
        if done >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, run in repeated.items():
            begin = time.perf_counter()
            run()
            shortest[name] = min(shortest[name], time.perf_counter() - begin)
    return shortest

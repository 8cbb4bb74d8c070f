"""Times several ways of doing one thing, in turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable


def time_in_turns(
    sides: dict[str, Callable[[], object]], budget_s: float, min_rounds: int = 3, max_rounds: int = 60
) -> dict[str, float]:
    """The shortest seconds of each side over several rounds; in a round every side runs once.

    The sides have run before (their results were checked): nothing is warmed up here.
    """
    shortest = dict.fromkeys(sides, float("inf"))
    end = time.perf_counter() + budget_s
    for done in range(max_rounds):
        if done >= min_rounds and time.perf_counter() > end:
            break
        for name, run in sides.items():
            begin = time.perf_counter()
            run()
            shortest[name] = min(shortest[name], time.perf_counter() - begin)
    return shortest

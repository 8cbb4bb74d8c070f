"""Times of the paths, and what follows from them: how much of the exchange shows, and how much overlap hides.

All sides take turns, by one clock for all ranks (clock.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringspan.bench.clock import Clock
from ringspan.bench.config import Config
from ringspan.bench.paths import MeasuredPath
from ringspan.bench.ranks import Ranks

Rounds = dict[str, list[float]]  # milliseconds by side, one number for each round
_WAITING = "/waiting"


def time_paths(
    config: Config, ranks: Ranks, paths: dict[str, MeasuredPath], beat: Callable[[str, int, int], None]
) -> Rounds:
    """Milliseconds of every path in `config.repeats` rounds, the same on every rank. Collective.

    Paths of rs.attention are also timed as "NAME/waiting": every exchange waits where it is posted, so that nothing
    overlaps. `beat("timing", done, all)` is called after each call of a side.
    """
    sides = {name: path.run for name, path in paths.items()}
    if ranks.world > 1:
        sides |= {name + _WAITING: _waiting(path) for name, path in paths.items() if path.exchange}
    rounds = config.warmup + config.repeats
    found: Rounds = {name: [] for name in sides}
    for done, (name, seconds) in enumerate(Clock(ranks).in_turns(sides, range(rounds)), 1):
        found[name].append(seconds * 1e3)
        beat("timing", done, rounds * len(sides))
    return {name: samples[config.warmup :] for name, samples in found.items()}


def describe_times(seq_len: int, paths: dict[str, MeasuredPath], rounds: Rounds) -> dict[str, dict[str, Any]]:
    """The entries `time_ms`, `tokens_per_s`, `exposed`, `without_overlap` and `overlap_share` of every path."""
    found = {}
    for name, path in paths.items():
        base = rounds[path.base] if path.base else None
        exposed = exposed_of(rounds[name], base) if base else None
        waiting, entry = rounds.get(name + _WAITING), None
        if base and waiting:
            entry = {"time_ms": spread_of(waiting), "exposed": exposed_of(waiting, base)}
        spread = spread_of(rounds[name])
        found[name] = {
            "time_ms": spread,
            "tokens_per_s": seq_len / spread["median"] * 1e3,
            "exposed": exposed,
            "without_overlap": entry,
            "overlap_share": overlap_share_of(exposed, entry["exposed"]) if exposed and entry else None,
        }
    return found


def spread_of(samples: list[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile (between two samples: linear), and the samples themselves."""
    p10, median, p90 = _quantiles(samples)
    return {"median": median, "p10": p10, "p90": p90, "samples": samples}


def exposed_of(with_exchange: list[float], without: list[float]) -> dict[str, float]:
    """What the exchange adds to a call.

    ms: the difference of the medians, which noise can make negative; share: that over the median with exchange. p10 and
    p90 are those of the differences round by round.
    """
    differences = [a - b for a, b in zip(with_exchange, without, strict=True)]
    shares = [d / a for d, a in zip(differences, with_exchange, strict=True)]
    median = _quantiles(with_exchange)[1]
    ms = median - _quantiles(without)[1]
    p10_ms, _, p90_ms = _quantiles(differences)
    p10_share, _, p90_share = _quantiles(shares)
    return {
        "ms": ms,
        "p10_ms": p10_ms,
        "p90_ms": p90_ms,
        "share": ms / median,
        "p10_share": p10_share,
        "p90_share": p90_share,
    }


def overlap_share_of(exposed: dict[str, float], without_overlap: dict[str, float]) -> float | None:
    """1 - exposed / exposed without overlap: 1 if all of the exchange is hidden, below 0 if overlapping costs time.

    None where the exchange cannot be told from noise even without overlap: where in more than a tenth of the rounds it
    added nothing (p10_ms <= 0), or its median is not above 0.
    """
    if without_overlap["p10_ms"] <= 0 or without_overlap["ms"] <= 0:
        return None
    return 1 - max(exposed["ms"], 0.0) / without_overlap["ms"]


def _waiting(path: MeasuredPath) -> Callable[[], Any]:
    def run() -> Any:
        torch.ops.ringspan._set_wait_at_post(True)
        try:
            return path.run()
        finally:
            torch.ops.ringspan._set_wait_at_post(False)

    return run


def _quantiles(samples: list[float]) -> tuple[float, float, float]:
    points = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    p10, median, p90 = torch.tensor(samples, dtype=torch.float64).quantile(points).tolist()
    return p10, median, p90

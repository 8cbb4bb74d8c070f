"""A rank fails at every place of a call, in every way: the others are told soon, and by name, and nothing is wrong.

By default a spread, the same each time. RINGSPAN_FAILURES=piece/pieces plays every place of every schedule and exchange
(`make soak-failures` does all pieces); RINGSPAN_FAILURES_SEED moves the victims.
"""

from __future__ import annotations

import functools
import os
import random

import pytest
from failure_trials import AT_ONCE_S, SOON_S, Tally, Trial, places_of

import ringspan as rs
from ringspan.names import AUTO, EXCHANGES, SCHEDULES

WHOLE = os.environ.get("RINGSPAN_FAILURES")
SEED = int(os.environ.get("RINGSPAN_FAILURES_SEED", "1"))
WAYS = ["kill", "throw", "memory", "stop", "pause"]
COMBINATIONS = [
    (schedule, exchange)
    for schedule in (*SCHEDULES, rs.hybrid(ulysses=2, ring=2), rs.double_ring(inner=2, outer=2))
    for exchange in EXCHANGES
    if AUTO not in (schedule, exchange) and (exchange != "all_gather" or schedule == "gather")
]
UNITS = [(*combination, what) for combination in COMBINATIONS for what in WAYS]
# Of each combination in the spread: a rank that is killed leaves most to chance.
PER_COMBINATION = {"kill": 2, "throw": 1, "memory": 1, "stop": 1, "pause": 1}


def units_of_piece() -> list[tuple[str, str, str]]:
    """Those of "piece/pieces"."""
    piece, pieces = map(int, WHOLE.split("/")) if WHOLE else (0, 1)
    return UNITS[piece::pieces] if WHOLE else []


def moments(what: str) -> list[Trial]:
    """Failures around the calls instead of in an exchange."""
    combinations = COMBINATIONS if WHOLE else [("ring", "all_to_all"), ("ulysses", "p2p")]
    return [
        Trial(schedule, exchange, what, moment, victim=(index + SEED) % 3, cold=cold)
        for index, (schedule, exchange) in enumerate(combinations)
        for moment, cold in (("before", True), ("before", False), ("agreement", True), ("agreement", False),
                             ("between", False))
    ]  # fmt: skip


@functools.cache
def counted_places(schedule: str, exchange: str) -> list[int]:
    return places_of(Trial(schedule, exchange, "kill"))


@pytest.fixture(scope="module")
def tally():
    """Of all trials of this module."""
    return Tally()


@pytest.mark.skipif(WHOLE is not None, reason="every place is played instead")
@pytest.mark.parametrize("what", WAYS)
def test_spread_over_places(tally, what):
    trials = []
    for schedule, exchange in COMBINATIONS:
        source = random.Random(f"{SEED} {schedule} {exchange} {what}")
        for part in range(PER_COMBINATION[what]):
            share = (part + source.random()) / PER_COMBINATION[what]
            trial = Trial(schedule, exchange, what, place=share)
            trials.append(Trial(schedule, exchange, what, place=share, victim=source.randrange(trial.world)))
    tally.run(trials)


@pytest.mark.parametrize(("schedule", "exchange", "what"), units_of_piece())
def test_every_place(tally, schedule, exchange, what):
    counts = counted_places(schedule, exchange)
    victim = (UNITS.index((schedule, exchange, what)) + SEED) % len(counts)
    assert counts[victim] > 0
    tally.run([Trial(schedule, exchange, what, place=place, victim=victim) for place in range(counts[victim])])


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_around_the_exchanges(tally, what):
    if WHOLE and not WHOLE.startswith("0/"):
        pytest.skip("part of piece 0")
    tally.run(moments(what))


def test_survivors_are_told_soon_and_by_name(tally, capsys):
    """Over all trials before."""
    if not tally.outcomes:
        pytest.skip("no trial was run")
    told, stopped, paused = tally.of("kill", "throw", "memory"), tally.of("stop"), tally.of("pause")
    if WHOLE:
        with capsys.disabled():
            for name, part in (("told", told), ("stopped", stopped), ("paused", paused)):
                print(f"\npiece {WHOLE} of seed {SEED}, {name}: {part.summary()}", end="")
    words = f"{told.summary()}\n{told.details()}"
    assert told.share_within(SOON_S) >= 0.95, words
    assert told.share_named() >= 0.99, words
    assert tally.share_of_next() >= 0.95, f"refused later than {AT_ONCE_S} s: {tally.summary()}"

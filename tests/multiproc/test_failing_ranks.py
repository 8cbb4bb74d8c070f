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
from ringspan.names import AUTO, EXCHANGES, SCHEDULES

import ringspan as rs

WHOLE = os.environ.get("RINGSPAN_FAILURES")
SEED = int(os.environ.get("RINGSPAN_FAILURES_SEED", "1"))
Combination = tuple[str, str]
COMBINATIONS: list[Combination] = [
    (schedule, exchange)
    for schedule in (*SCHEDULES, rs.hybrid(ulysses=2, ring=2), rs.double_ring(inner=2, outer=2))
    for exchange in EXCHANGES
    if AUTO not in (schedule, exchange) and (exchange != "all_gather" or schedule == "gather")
]
# How many places of each combination are in the spread.
SPREAD = {"kill": 2, "throw": 1, "memory": 1, "stop": 1, "pause": 1}
AROUND = ["kill", "stop"]
AROUND_COMBINATIONS = [("ring", "all_to_all"), ("ulysses", "p2p")]
MOMENTS = [("before", True), ("before", False), ("agreement", True), ("agreement", False), ("between", False)]
TIMES = 20 if WHOLE else 1


def cut(ways: list[str], few: list[Combination]) -> list:
    """(way, combinations) for one test each: a few of all, or the piece of the whole."""
    if WHOLE is None:
        return [pytest.param(what, few, id=what) for what in ways]
    piece, pieces = map(int, WHOLE.split("/"))
    units = [(what, one) for what in ways for one in COMBINATIONS]
    return [pytest.param(what, [one], id="-".join((what, *one))) for what, one in units[piece::pieces]]


def victim_of(*about: str, world: int) -> int:
    """Another one with each seed."""
    return (random.Random(" ".join(about)).randrange(world) + SEED) % world


def spread(what: str, schedule: str, exchange: str) -> list[Trial]:
    """Some places, drawn from as many equal parts of a step."""
    source, count = random.Random(f"{SEED} {what} {schedule} {exchange}"), SPREAD[what]
    world = Trial(schedule, exchange, what).world
    return [
        Trial(schedule, exchange, what, place=(part + source.random()) / count, victim=source.randrange(world))
        for part in range(count)
    ]


@functools.cache
def counted_places(schedule: str, exchange: str) -> list[int]:
    return places_of(Trial(schedule, exchange, "kill"))


def every_place(what: str, schedule: str, exchange: str) -> list[Trial]:
    counts = counted_places(schedule, exchange)
    victim = victim_of(what, schedule, exchange, world=len(counts))
    assert counts[victim] > 0
    return [Trial(schedule, exchange, what, place=place, victim=victim) for place in range(counts[victim])]


def every_moment(what: str, schedule: str, exchange: str) -> list[Trial]:
    """Around the exchanges."""
    victim = victim_of("around", what, schedule, exchange, world=Trial(schedule, exchange, what).world)
    return [Trial(schedule, exchange, what, moment, victim=victim, cold=cold) for moment, cold in MOMENTS]


def some_times(what: str, schedule: str, exchange: str) -> list[Trial]:
    """At any time of a step."""
    source = random.Random(f"{SEED} time {what} {schedule} {exchange}")
    world = Trial(schedule, exchange, what).world
    return [
        Trial(schedule, exchange, what, "time", source.random(), victim=source.randrange(world)) for _ in range(TIMES)
    ]


@pytest.fixture(scope="module")
def tally():
    """Of all trials of this module."""
    return Tally()


@pytest.mark.parametrize(("what", "combinations"), cut(list(SPREAD), COMBINATIONS))
def test_a_rank_fails_at_a_place(tally, what, combinations):
    """Of exchange work, forward and backward."""
    tally.run([trial for one in combinations for trial in (every_place if WHOLE else spread)(what, *one)])


@pytest.mark.parametrize(("what", "combinations"), cut(["kill"], COMBINATIONS))
def test_a_rank_is_killed_at_some_time(tally, what, combinations):
    """Which need not be in an exchange."""
    tally.run([trial for one in combinations for trial in some_times(what, *one)])


@pytest.mark.parametrize(("what", "combinations"), cut(AROUND, AROUND_COMBINATIONS))
def test_a_rank_fails_around_the_exchanges(tally, what, combinations):
    """Nobody waits for a message of it yet, and in a cold group nobody has heard of it."""
    here = Tally()
    tally.outcomes += here.run([trial for one in combinations for trial in every_moment(what, *one)])
    if what == "kill":
        assert here.share_within(SOON_S) >= 0.95, f"{here.summary()}\n{here.details()}"


def test_survivors_are_told_soon_and_by_name(tally, capsys):
    """Over all trials before."""
    if not tally.outcomes:
        pytest.skip("no trial was run")
    parts = {"told": tally.of("kill", "throw", "memory"), "stopped": tally.of("stop"), "paused": tally.of("pause")}
    if WHOLE:
        with capsys.disabled():
            for name, part in parts.items():
                print(f"\npiece {WHOLE} of seed {SEED}, {name}: {part.summary()}", end="")
    told = parts["told"]
    words = f"{told.summary()}\n{told.details()}"
    assert told.share_within(SOON_S) >= 0.95, words
    assert told.share_named() >= 0.99, words
    assert tally.share_of_next() >= 0.95, f"refused later than {AT_ONCE_S} s: {tally.summary()}"

"""Two ranks with a network between them that is slow, loses packets, or is cut.

A cut tells nobody: only the deadline can. Needs root and /dev/net/tun; where these are missing the tests are skipped,
and fail under `make check` (RINGSPAN_CI). By default a spread; RINGSPAN_FAILURES=piece/pieces plays the whole.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import judge
import pytest
from cases import Case
from failing_jobs import Join, Told
from failing_ranks import Ranks, StoreHost
from failure_trials import MARGIN_S, PEER_ERROR
from tunnel import ADDRESSES, INTERFACE, Link, Tunnel, Unavailable

WHOLE = os.environ.get("RINGSPAN_FAILURES")
TIMEOUT_S, DEADLINE_S, CUT_S = 60.0, 3.0, 0.8
ABREAST = 6  # each waits most of the time
SCHEDULES = ["ring", "gather", "ulysses", "pruned", "q_ring", "invariant", "hybrid:2x1", "double_ring:2x1"]
ROUTES = [(schedule, exchange) for schedule in SCHEDULES for exchange in ("all_to_all", "p2p")]
SPREAD = [("ring", "all_to_all"), ("ring", "p2p"), ("ulysses", "all_to_all"), ("pruned", "p2p")]
CHOSEN = ROUTES if WHOLE else SPREAD
SHARES = [None, *(part / 12 for part in range(12))] if WHOLE else [None, 0.3, 0.7]


def groups() -> list:
    """Of routes, for one test each: all of the spread, or one of the piece."""
    if WHOLE is None:
        return [pytest.param(SPREAD, id="spread")]
    piece, pieces = map(int, WHOLE.split("/"))
    return [pytest.param([route], id="-".join(route)) for route in ROUTES[piece::pieces]]


@dataclass(frozen=True)
class Cut:
    """In the middle of a step's exchanges (`share` of its places), or before its calls; `heals` before the deadline."""

    schedule: str
    exchange: str
    share: float | None
    heals: bool


@pytest.fixture(scope="module", autouse=True)
def needs_networks() -> None:
    """Skips, or fails where nothing may be skipped."""
    try:
        Tunnel().close()
    except Unavailable as error:
        if os.environ.get("RINGSPAN_CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@contextlib.contextmanager
def joined() -> Iterator[tuple[Tunnel, Ranks]]:
    """Two ranks, each in a network of its own; the store is in that of rank 0."""
    with Tunnel() as tunnel:
        host = StoreHost(host=ADDRESSES[0], namespace=tunnel.namespaces[0])
        try:
            with Ranks(2) as ranks:
                for rank in range(2):
                    join = Join(host.store, 2, TIMEOUT_S, None, INTERFACE, tunnel.namespaces[rank])
                    ranks.tell(rank, "join", join=join)
                assert ranks.wait(), f"the ranks do not find each other\n{ranks.words()}"
                wrong = [str(ranks.last(rank)) for rank in range(2) if ranks.last(rank).kind]
                assert not wrong, "\n".join(wrong)
                yield tunnel, ranks
        finally:
            host.close()


def case_of(schedule: str, exchange: str, number: int) -> Case:
    """Its messages are of many packets."""
    return Case(("causal",), ("head_tail",), seq_len=192, qk_dim=64, v_dim=64, schedule=schedule, exchange=exchange,
                seed=number)  # fmt: skip


def assert_right(ranks: Ranks) -> None:
    """Everything that was returned."""
    for rank, errors in enumerate(ranks.do("check")):
        wrong = {name: error for name, error in errors.items() if not error <= judge.limit_of(name, "float32")}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("link", [Link(delay_s=0.02), Link(loss=0.02), Link(delay_s=0.005, loss=0.01)], ids=str)
def test_a_slow_or_lossy_network_changes_no_result(link):
    with joined() as (tunnel, ranks):
        before = tunnel.set(link)
        for number, (schedule, exchange) in enumerate(CHOSEN):
            ranks.do("step", case=case_of(schedule, exchange, number))
        after = tunnel.set(link)
        assert_right(ranks)
    assert after.passed - before.passed > 100
    assert (after.lost - before.lost > 0) == (link.loss > 0)


def play_cut(cut: Cut) -> tuple[list[str], list[float]]:
    """What is wrong with how the ranks took it, and after how many seconds each of them raised."""
    with joined() as (tunnel, ranks):
        ranks.do("count_places")
        ranks.do("step", case=case_of(cut.schedule, cut.exchange, 0))
        count = ranks.do("places")[0]
        ranks.do("set_deadline", seconds=DEADLINE_S)
        if cut.share is None:
            began = tunnel.set(Link(is_cut=True)).at
        else:
            ranks.tell(0, "trap", place=int(cut.share * count), what="stop")
        for rank in range(2):
            for command, number in (("forward", 1), ("backward", 0), ("forward", 2)):
                ranks.tell(rank, command, **({"case": case_of(cut.schedule, cut.exchange, number)} if number else {}))
            ranks.tell(rank, "check")
        if cut.share is not None:
            # The rank is held up at the place until the link is cut.
            assert ranks.wait([0], within_s=10), ranks.words()
            assert ranks.stopped(0), f"rank 0 never came to the place\n{ranks.words()}"
            began = tunnel.set(Link(is_cut=True)).at
            ranks.signal(0, signal.SIGCONT)
        if cut.heals:
            time.sleep(CUT_S)
            tunnel.set(Link())
        if not ranks.wait(within_s=4 * DEADLINE_S + 10):
            return [f"a rank is left waiting\n{ranks.words()}"], []
        seconds: list[float] = []
        faults = [fault for rank in range(2) for fault in faults_of(cut, rank, ranks.told(rank), began, seconds)]
        return faults, seconds


def faults_of(cut: Cut, rank: int, told: list[Told], began: float, seconds: list[float]) -> list[str]:
    """Of one rank; when it raised is added to `seconds`."""
    calls = [one for one in told if one.command in ("forward", "backward")]
    raised = next((one for one in calls if one.kind), None)
    faults = [
        f"rank {rank}: {name} is off by {error:.3g}"
        for name, error in told[-1].value.items()
        if not error <= judge.limit_of(name, "float32")
    ]
    if cut.heals:
        return faults + ([f"rank {rank} raised although the link came back: {raised}"] if raised else [])
    if raised is None:
        return [*faults, f"rank {rank} raised nothing"]
    seconds.append(raised.ended - max(began, raised.began))
    if raised.kind != PEER_ERROR or seconds[-1] > DEADLINE_S + MARGIN_S:
        faults.append(f"rank {rank} after {seconds[-1]:.2f} s: {raised}")
    return faults


def assert_cuts(cuts: list[Cut]) -> str:
    """Their figures in one line."""
    with ThreadPoolExecutor(ABREAST) as abreast:
        found = list(abreast.map(play_cut, cuts))
    faults = [f"{cut}: {fault}" for cut, (those, _) in zip(cuts, found, strict=True) for fault in those]
    seconds = [one for _, those in found for one in those]
    figures = f"{len(cuts)} cuts, {len(seconds)} ranks raised, the last after {max(seconds, default=0.0):.2f} s"
    assert not faults, f"{len(faults)} faults\n" + "\n".join([figures, *faults[:12]])
    return figures


@pytest.mark.parametrize("heals", [False, True], ids=["for good", "heals"])
@pytest.mark.parametrize("routes", groups())
def test_a_cut_network(heals, routes, capsys):
    """For good: both sides are told by the deadline. One that heals before it is nothing."""
    figures = assert_cuts([Cut(schedule, exchange, share, heals) for schedule, exchange in routes for share in SHARES])
    if WHOLE:
        with capsys.disabled():
            print(f"\npiece {WHOLE}, network of {routes[0]}, heals {heals}: {figures}", end="")

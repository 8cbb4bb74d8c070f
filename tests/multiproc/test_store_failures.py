"""The store of a group: its host stops or dies, it is of another kind, it serves several groups one after another."""

from __future__ import annotations

import contextlib
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
from failure_trials import MARGIN_S, PEER_ERROR, SOON_S, blamed

TIMEOUT_S, DEADLINE_S, PAUSE_S = 30.0, 2.0, 0.6
ABREAST = 5
CALLS = ["forward", "backward", "forward", "forward"]


def case_of(number: int, schedule: str = "ring", exchange: str = "all_to_all") -> Case:
    return Case(("causal",), ("head_tail",), seq_len=48, schedule=schedule, exchange=exchange, seed=number)


@contextlib.contextmanager
def hosted(world: int = 3, use_libuv: bool = True) -> Iterator[tuple[StoreHost, Ranks]]:
    """Ranks, and the process of their store. They have not joined."""
    host = StoreHost(use_libuv)
    try:
        with Ranks(world) as ranks:
            yield host, ranks
    finally:
        host.close()


def assert_right(ranks: Ranks, among: list[int] | None = None) -> None:
    """All that was returned on these ranks."""
    chosen = list(range(ranks.world)) if among is None else among
    for rank in chosen:
        ranks.tell(rank, "check")
    assert ranks.wait(chosen), ranks.words()
    for rank in chosen:
        told = ranks.last(rank)
        assert told is not None, f"rank {rank} has ended\n{ranks.words()}"
        assert told.kind is None, f"rank {rank}: {told}"
        assert told.value, f"rank {rank} returned nothing"
        wrong = {name: error for name, error in told.value.items() if not error <= judge.limit_of(name, "float32")}
        assert not wrong, f"rank {rank}: {wrong}"


@dataclass(frozen=True)
class Loss:
    """What becomes of the store's host (stop, pause: for less than the deadline, kill), and where the ranks are then.

    moment: "before" a call, in the "agreement" (all but rank 1 are), in the "exchange". cold: no call was made before.
    """

    what: str
    moment: str
    cold: bool = False


LOSSES = [
    Loss(what, moment, cold)
    for what in ("stop", "pause", "kill")
    for moment, cold in (("before", False), ("before", True), ("agreement", False), ("agreement", True),
                         ("exchange", False))
]  # fmt: skip


def play(loss: Loss) -> list[str]:
    """What is wrong with how the ranks took it."""
    with hosted() as (host, ranks):
        ranks.join(Join(host.store, 3, TIMEOUT_S))
        if not loss.cold:
            ranks.do("step", case=case_of(0))
        ranks.do("set_deadline", seconds=DEADLINE_S)
        lost = _lose(loss, host, ranks)
        if loss.what == "pause":
            time.sleep(PAUSE_S)
            host.signal(signal.SIGCONT)
        if not ranks.wait(within_s=4 * (DEADLINE_S + MARGIN_S) + 10):
            return [f"a rank is left waiting\n{ranks.words()}"]
        faults = [fault for rank in range(3) for fault in _faults_of(loss, rank, ranks.told(rank), lost)]
        return [*faults, ranks.words()] if faults else []


def _lose(loss: Loss, host: StoreHost, ranks: Ranks) -> float:
    """Has the ranks make their calls and the store go in them; when it did."""
    number = signal.SIGKILL if loss.what == "kill" else signal.SIGSTOP
    lost = host.signal(number) if loss.moment == "before" else 0.0
    if loss.moment == "agreement":
        ranks.tell(1, "pause", seconds=0.6)
    if loss.moment == "exchange":
        ranks.tell(1, "trap", place=2, what="stop")
    for rank in range(3):
        for index, command in enumerate(CALLS):
            ranks.tell(rank, command, **({} if command == "backward" else {"case": case_of(index + 1)}))
        ranks.tell(rank, "check")
    if loss.moment == "agreement":
        time.sleep(0.3)
        lost = host.signal(number)
    if loss.moment == "exchange":
        assert ranks.wait([1], within_s=10), ranks.words()
        assert ranks.stopped(1), f"rank 1 never came to the place\n{ranks.words()}"
        lost = host.signal(number)
        ranks.signal(1, signal.SIGCONT)
    return lost


def _faults_of(loss: Loss, rank: int, told: list[Told], lost: float) -> list[str]:
    calls = [one for one in told if one.command in CALLS]
    faults = [
        f"rank {rank}: {name} is off by {error:.3g}"
        for name, error in told[-1].value.items()
        if not error <= judge.limit_of(name, "float32")
    ]
    raised = [one for one in calls if one.kind]
    if loss.what == "pause":
        return faults + [f"rank {rank} raised although the store went on: {one}" for one in raised]
    # An exchange needs no store, so that a call may end well; the next one cannot begin.
    if not raised or raised[0] is calls[-1]:
        faults.append(f"rank {rank} did not raise: " + "; ".join(map(str, calls)))
    # PyTorch tries for long to connect to a store that is not there, so that a cold group ends by the deadline.
    limit = SOON_S if loss.what == "kill" and not loss.cold else DEADLINE_S + MARGIN_S
    for one in raised:
        seconds = one.ended - max(lost, one.began)
        if one.kind != PEER_ERROR or seconds > limit:
            faults.append(f"rank {rank} raised {seconds:.2f} s (limit {limit:g}) after the loss: {one}")
    return faults


@pytest.mark.parametrize("what", ["stop", "pause", "kill"])
def test_the_host_of_the_store_is_lost(what):
    losses = [loss for loss in LOSSES if loss.what == what]
    with ThreadPoolExecutor(ABREAST) as abreast:
        found = list(abreast.map(play, losses))
    faults = [f"{loss}: {fault}" for loss, faults in zip(losses, found, strict=True) for fault in faults]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)


def assert_absence_is_told(ranks: Ranks, absent: int = 1) -> None:
    """One rank makes no call: the others name it, in time; then it is told too."""
    others = [rank for rank in range(ranks.world) if rank != absent]
    for rank in others:
        ranks.tell(rank, "forward", case=case_of(9))
    assert ranks.wait(others, within_s=20), ranks.words()
    ranks.tell(absent, "forward", case=case_of(9))
    assert ranks.wait(within_s=20), ranks.words()
    for rank in range(ranks.world):
        told = ranks.last(rank)
        assert told.kind == PEER_ERROR, f"rank {rank}: {told}"
        assert told.took <= DEADLINE_S + MARGIN_S, f"rank {rank}: {told}"
        assert blamed(told.message) == {absent} or rank == absent, f"rank {rank}: {told}"


def store_of_kind(kind: str, host: StoreHost, path: str) -> tuple:
    return {
        "tcp": host.store,
        "file": ("file", path),
        "prefix of tcp": ("prefix", host.store),
        "prefix of file": ("prefix", ("file", path)),
    }[kind]


@pytest.mark.parametrize("kind", ["tcp", "tcp without libuv", "file", "prefix of tcp", "prefix of file"])
def test_every_kind_of_store_serves(kind, tmp_path):
    with hosted(use_libuv=kind != "tcp without libuv") as (host, ranks):
        store = store_of_kind(kind.removesuffix(" without libuv"), host, str(tmp_path / "store"))
        ranks.join(Join(store, 3, TIMEOUT_S))
        for number, exchange in enumerate(("all_to_all", "p2p")):
            ranks.do("step", case=case_of(number, exchange=exchange))
        assert_right(ranks)
        ranks.do("set_deadline", seconds=DEADLINE_S)
        assert_absence_is_told(ranks)


def test_threads_are_ranks_over_a_hash_store():
    """A HashStore lives within one process."""
    with Ranks(1) as ranks:
        for absent in (None, 1):
            ranks.do("attend_in_threads", cases=[case_of(0), case_of(1)], world=2, deadline_s=DEADLINE_S, absent=absent)
            errors, told = ranks.last(0).value
            wrong = {name: error for name, error in errors.items() if not error <= judge.limit_of(name, "float32")}
            assert not wrong
            if absent is None:
                assert errors.keys() >= {"out", "dq", "dk", "dv"}
                assert told == [None, None]
            else:
                assert told[0] is not None
                assert told[0].kind == PEER_ERROR
                assert blamed(told[0].message) == {1}
                assert told[0].took <= DEADLINE_S + MARGIN_S


@pytest.mark.parametrize("callers", [[], [0], [0, 2], [0, 1, 2]], ids=str)
def test_a_group_that_is_made_again_on_its_store(callers):
    """Ranks that had called in the first group, and such that had not, are together in the next ones."""
    with hosted() as (host, ranks):
        join = Join(host.store, 3, TIMEOUT_S, DEADLINE_S)
        for number in range(3):
            ranks.join(join)
            if number > 0:
                callers = [0, 1, 2]
            for rank in callers:
                ranks.tell(rank, "step", case=case_of(number))
            assert ranks.wait(within_s=20), ranks.words()
            kinds = {ranks.last(rank).kind for rank in callers}
            assert kinds <= {None if len(callers) == 3 else PEER_ERROR}, ranks.words()
            ranks.do("leave")
            ranks.tell(0, "forget_addresses")
            assert ranks.wait(), ranks.words()
            assert ranks.last(0).value > 0
        assert_right(ranks)


def test_two_groups_on_one_store():
    """Their calls do not mix, and a failure in one leaves the other alone."""
    with hosted() as (host, ranks):
        ranks.join(Join(host.store, 3, TIMEOUT_S))
        ranks.do("add_group", name="other", ranks=[0, 1, 2])
        for number in range(3):
            for rank in range(3):
                ranks.tell(rank, "step", case=case_of(number), group="world")
                ranks.tell(rank, "step", case=case_of(number + 10), group="other")
        ranks.do("count_places")
        ranks.tell(1, "trap", place=1, what="throw")
        for rank in range(3):
            ranks.tell(rank, "step", case=case_of(20), group="other")
        assert ranks.wait(within_s=20), ranks.words()
        kinds = [ranks.last(rank).kind for rank in range(3)]
        assert kinds == [PEER_ERROR, "RuntimeError", PEER_ERROR], "\n".join(str(ranks.last(rank)) for rank in range(3))
        ranks.do("step", case=case_of(21), group="world")
        ranks.do("step", case=case_of(22), group="world")
        assert_right(ranks)

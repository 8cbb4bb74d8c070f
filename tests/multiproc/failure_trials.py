"""One failure of one rank, and how the others took it: what tests of failing ranks run and judge.

clean step | trap set | forward | backward | next forward | check against the oracle
                        '------ the victim fails in here -'
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import judge
from cases import Case
from failing_jobs import Join, Told
from failing_ranks import Ranks, StoreHost

# Of a failure that can be told at once: the deadline is the last resort, and with 2 s more the bound of everything.
TIMEOUT_S, DEADLINE_S, MARGIN_S = 30.0, 10.0, 2.0
# Of a rank that is stopped, which nobody but the deadline can tell from one that computes; and a stop below it.
STOP_DEADLINE_S, STOP_S = 2.0, 0.5
AT_ONCE_S, SOON_S = 0.1, 2.0
ABREAST = 4  # trials of stopped ranks at a time: they wait most of the time

PEER_ERROR = "DistBackendError"
OWN_ERRORS = {"throw": {"RuntimeError"}, "memory": {"MemoryError", "OutOfMemoryError"}}
# The parts of a message that say whose fault it is; where it happened may name others.
_BLAME = re.compile(
    r"lost peer (\d+)|rank (\d+) (?:failed|has ended|has closed|has left|has said nothing|showed no sign)"
    r"|waited for ranks? (\d+(?:, \d+)*)"
)


@dataclass(frozen=True)
class Trial:
    """`what` the victim does: kill, stop (itself, for longer than the deadline), pause (likewise, for less), throw,
    memory.

    moment: "place" of exchange work (`place`: its number, or the share of all of a step in [0, 1)), a "time" (the share
    of a step's), "before" its calls, in the "agreement" after it has published its header, or "between" forward and
    backward. cold: the group has made no call before.
    """

    schedule: str
    exchange: str
    what: str
    moment: str = "place"
    place: int | float = 0
    victim: int = 1
    cold: bool = False

    @property
    def world(self) -> int:
        return 4 if self.schedule.startswith(("hybrid", "double_ring")) else 3

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.victim]

    @property
    def stops(self) -> bool:
        return self.what in ("stop", "pause")

    @property
    def deadline_s(self) -> float:
        return STOP_DEADLINE_S if self.stops else DEADLINE_S

    def case(self, number: int) -> Case:
        """The trial's calls differ in their data, so that a result of another call is a wrong one."""
        return Case(
            ("causal",), ("head_tail",), seq_len=48, schedule=self.schedule, exchange=self.exchange, seed=number
        )


@dataclass(frozen=True)
class Raised:
    """A survivor's first exception: after how many seconds of the failure, or of its call where that began later."""

    rank: int
    seconds: float
    is_named: bool  # the first failed rank, and no other, is said to be at fault
    told: Told


@dataclass
class Outcome:
    """What became of a trial. `faults`: what may not happen even once."""

    trial: Trial
    raised: list[Raised] = field(default_factory=list)
    seconds_of_next: list[float] = field(default_factory=list)  # of calls in a group that an exchange had closed
    wrong: int = 0
    faults: list[str] = field(default_factory=list)


def blamed(message: str) -> set[int]:
    """The ranks that a message says are at fault."""
    numbers = (number for found in _BLAME.findall(message) for number in found if number)
    return {int(number) for text in numbers for number in text.split(", ")}


def run(trial: Trial) -> Outcome:
    """Plays a trial."""
    outcome = Outcome(trial)
    host = StoreHost()
    try:
        with Ranks(trial.world) as ranks:
            ranks.join(Join(host.store, trial.world, TIMEOUT_S))
            place = _prepare(trial, ranks)
            ranks.do("set_deadline", seconds=trial.deadline_s)
            failed = _fail(trial, ranks, place)
            if failed is None:
                outcome.faults.append(f"the victim was never seen to fail\n{ranks.words()}")
            else:
                _judge(outcome, ranks, failed)
    except AssertionError as error:
        outcome.faults.append(f"before the failure: {error}")
    finally:
        host.close()
    return outcome


def places_of(trial: Trial) -> list[int]:
    """How many places each rank has in a step of this trial."""
    host = StoreHost()
    try:
        with Ranks(trial.world) as ranks:
            ranks.join(Join(host.store, trial.world, TIMEOUT_S))
            ranks.do("count_places")
            ranks.do("step", case=trial.case(0))
            return ranks.do("places")
    finally:
        host.close()


def _prepare(trial: Trial, ranks: Ranks) -> float:
    """The clean step; the number of the place, or the seconds."""
    if trial.cold:
        return trial.place
    if trial.moment != "place":
        ranks.do("step", case=trial.case(0))
        ranks.do("step", case=trial.case(0))  # the first one takes longer
        return trial.place * ranks.last(trial.victim).took
    ranks.do("count_places")
    ranks.do("step", case=trial.case(0))
    count = ranks.do("places")[trial.victim]
    return trial.place if isinstance(trial.place, int) else int(trial.place * count)


def _fail(trial: Trial, ranks: Ranks, place: float) -> float | None:
    """Has the ranks make their calls and the victim fail in them; when it did."""
    number = signal.SIGSTOP if trial.stops else signal.SIGKILL
    if trial.moment == "place":
        ranks.tell(trial.victim, "trap", place=place, what="stop" if trial.stops else trial.what)
    if trial.moment == "before":
        ranks.tell(trial.victim, "signal", number=number)
    if trial.moment == "agreement":
        ranks.tell(trial.survivors[-1], "pause", seconds=0.8)  # so that the victim's header is there, and not all are
    for rank in range(trial.world):
        ranks.tell(rank, "forward", case=trial.case(1))
        if trial.moment == "between" and rank == trial.victim:
            ranks.tell(rank, "signal", number=number)
        ranks.tell(rank, "backward")
        ranks.tell(rank, "forward", case=trial.case(2))
        if trial.moment == "time" and rank != trial.victim:
            ranks.tell(rank, "forward", case=trial.case(3))  # the signal may come after all calls of the victim
        ranks.tell(rank, "check")
    if trial.moment in ("agreement", "time"):
        time.sleep(0.4 if trial.moment == "agreement" else place)
        ranks.signal(trial.victim, number)
    if trial.what == "pause":
        ranks.wait([trial.victim], within_s=10)
        stopped = ranks.stopped(trial.victim)
        time.sleep(STOP_S)
        ranks.signal(trial.victim, signal.SIGCONT)
        return stopped
    return _moment_of_failure(trial, ranks)


def _moment_of_failure(trial: Trial, ranks: Ranks) -> float | None:
    if trial.what == "kill":
        return ranks.wait_for_end(trial.victim, within_s=10)
    ranks.wait([trial.victim], within_s=10)
    if trial.stops:
        return ranks.stopped(trial.victim)
    # When it was trapped is not known; its call began a little earlier.
    return next((told.began for told in ranks.told(trial.victim) if told.kind), None)


def _judge(outcome: Outcome, ranks: Ranks, failed: float) -> None:
    trial = outcome.trial
    if not ranks.wait(trial.survivors, within_s=3 * trial.deadline_s + 20):
        outcome.faults.append("survivors are left waiting")
    for rank in trial.survivors:
        if ranks.ended(rank) is not None:
            outcome.faults.append(f"rank {rank}, a survivor, ended")
        _judge_results(outcome, rank, ranks.last(rank))
        if trial.what != "pause":
            _judge_survivor(outcome, rank, _calls_of(ranks.told(rank)), failed)
    if trial.what != "kill":
        if trial.what == "stop":
            ranks.signal(trial.victim, signal.SIGCONT)
        if not ranks.wait([trial.victim], within_s=3 * trial.deadline_s + 20):
            outcome.faults.append("the victim is left waiting")
        _judge_results(outcome, trial.victim, ranks.last(trial.victim))
    if trial.what in OWN_ERRORS:
        _judge_victim(outcome, _calls_of(ranks.told(trial.victim)))
    if trial.what == "pause":
        raised = [f"rank {rank}: {told}" for rank in range(trial.world) for told in ranks.told(rank) if told.kind]
        outcome.faults += [f"raised although all went on: {text}" for text in raised]
    if outcome.faults:
        outcome.faults.append(ranks.words())


def _calls_of(told: list[Told]) -> list[Told]:
    return [one for one in told if one.command in ("forward", "backward")]


def _judge_results(outcome: Outcome, rank: int, told: Told | None) -> None:
    """`told`: of the check."""
    if told is None or told.command != "check" or told.kind:
        outcome.faults.append(f"rank {rank}: its results were not compared ({told})")
        return
    for name, error in told.value.items():
        if not error <= judge.limit_of(name, "float32"):
            outcome.wrong += 1
            outcome.faults.append(f"rank {rank}: {name} is off by {error:.3g}")


def _judge_survivor(outcome: Outcome, rank: int, calls: list[Told], failed: float) -> None:
    trial = outcome.trial
    first = next((index for index, told in enumerate(calls) if told.kind), None)
    if first is None:
        outcome.faults.append(f"rank {rank} raised nothing: " + "; ".join(map(str, calls[-3:])))
        return
    told = calls[first]
    seconds = told.ended - max(failed, told.began)
    is_named = blamed(told.message) == {trial.victim} and (trial.what not in OWN_ERRORS or "trapped" in told.message)
    outcome.raised.append(Raised(rank, seconds, is_named, told))
    if told.kind != PEER_ERROR:
        outcome.faults.append(f"rank {rank} raised {told}")
    if seconds > trial.deadline_s + MARGIN_S:
        outcome.faults.append(f"rank {rank} raised {seconds:.1f} s after the failure: {told}")
    # That of the trap, unless it is the last: that one fails in its agreement, which closes no group.
    if trial.moment == "place" and first + 1 < len(calls):
        _judge_next(outcome, rank, calls[-1])


def _judge_next(outcome: Outcome, rank: int, told: Told) -> None:
    outcome.seconds_of_next.append(told.took)
    if told.kind != PEER_ERROR:
        outcome.faults.append(f"rank {rank}: the group is closed, and the next call is not refused: {told}")


def _judge_victim(outcome: Outcome, calls: list[Told]) -> None:
    trial = outcome.trial
    told = next(told for told in calls if told.kind)
    if told.kind not in OWN_ERRORS[trial.what] or "trapped" not in told.message:
        outcome.faults.append(f"the victim raised another error than its own: {told}")
    if told is not calls[-1]:
        _judge_next(outcome, trial.victim, calls[-1])


@dataclass
class Tally:
    """Figures over all survivors of many trials."""

    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, trials: list[Trial]) -> list[Outcome]:
        """Plays trials, some at a time where they mostly wait, and asserts what must hold in each."""
        outcomes = list(play(trials))
        self.outcomes += outcomes
        faults = [f"{one.trial}\n    " + "\n    ".join(one.faults) for one in outcomes if one.faults]
        assert not faults, f"{len(faults)} of {len(trials)} trials have faults\n" + "\n".join(faults[:8])
        return outcomes

    def of(self, *whats: str) -> Tally:
        """The part of these failures."""
        return Tally([one for one in self.outcomes if one.trial.what in whats])

    @property
    def raised(self) -> list[Raised]:
        return [raised for one in self.outcomes for raised in one.raised]

    def share_within(self, seconds: float) -> float:
        return _share(raised.seconds <= seconds for raised in self.raised)

    def share_named(self) -> float:
        return _share(raised.is_named for raised in self.raised)

    def share_of_next(self) -> float:
        return _share(seconds <= AT_ONCE_S for one in self.outcomes for seconds in one.seconds_of_next)

    def summary(self) -> str:
        """One line."""
        worst = max((raised.seconds for raised in self.raised), default=0.0)
        return (
            f"{len(self.outcomes)} trials, {len(self.raised)} survivors raised, {self.share_within(SOON_S):.1%} within "
            f"{SOON_S:g} s, the last after {worst:.2f} s, {self.share_named():.1%} named the first failed rank, "
            f"{self.share_of_next():.1%} of next calls refused within {AT_ONCE_S:g} s, "
            f"{sum(one.wrong for one in self.outcomes)} wrong results, "
            f"{sum(bool(one.faults) for one in self.outcomes)} trials with faults"
        )

    def details(self) -> str:
        """Those that were late, or named another."""
        lines = [
            f"{one.trial}: rank {raised.rank} after {raised.seconds:.2f} s: {raised.told}"
            for one in self.outcomes
            for raised in one.raised
            if raised.seconds > SOON_S or not raised.is_named
        ]
        return "\n".join(lines[:20])


def _share(flags: Iterable[bool]) -> float:
    listed = list(flags)
    return sum(listed) / len(listed) if listed else 1.0


def play(trials: list[Trial]) -> Iterator[Outcome]:
    """Those that stop ranks some at a time, the others one by one: their seconds are what is measured."""
    with ThreadPoolExecutor(ABREAST) as abreast:
        yield from abreast.map(run, [trial for trial in trials if trial.stops])
    for trial in trials:
        if not trial.stops:
            yield run(trial)

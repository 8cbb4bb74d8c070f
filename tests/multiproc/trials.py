"""Trials: all ranks of a group do one thing each, and say what they saw of it and whether the group is as it was."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import oracle
import torch
import torch.distributed as dist
from pool import Fresh

import ringspan as rs

SECONDS = 1.0  # a rank that is told raises within this time; one that is not waits for the group's timeout
FRESH = Fresh(timeout_s=2.5, count=3)  # the groups of a job's arena
EXACT = 1e-12  # of the next call, in float64
KEPT = 6000  # characters of a message that a trial brings home
LONGEST = 10_000  # a message that is cut where it is long stays below


@dataclass
class Told:
    """What one rank saw. `kind` is the name of what was raised, None if nothing was."""

    kind: str | None
    message: str
    length: int  # of the whole message
    seconds: float
    calls: int  # the group's counter on this rank, afterwards
    sent: int  # messages of data that this rank posted
    next_error: float  # of an ordinary call afterwards, against the oracle; inf if it raised
    value: Any = None  # for jobs


class Arena:
    """The group of a job's trials: the first of `spares`. One that a trial has left unusable is left for the next."""

    def __init__(self, control: dist.ProcessGroup, spares: list[dist.ProcessGroup]) -> None:
        self.control, self._spares = control, list(spares)
        self.rank, self.world = dist.get_rank(control), dist.get_world_size(control)
        self.group: Any = self._spares.pop(0)

    @property
    def is_used_up(self) -> bool:
        """No group is left; a trial would show nothing."""
        return self.group is None

    @property
    def name(self) -> str:
        return self.group.group_name

    def calls(self) -> int:
        """How many calls this rank has taken part in."""
        return torch.ops.ringspan._calls(self.name)

    def share(self, value: Any) -> list:
        """Every rank's value, in rank order. The same moment for all."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def trial(self, call: Callable[[], Any]) -> Told:
        """Runs `call` at the same moment on every rank, then an ordinary call."""
        self.share(None)
        before = torch.ops.ringspan._traffic(self.name)[0]
        begin, kind, message = time.monotonic(), None, ""
        try:
            call()
        except BaseException as error:  # KeyboardInterrupt is one of the exceptions under test
            kind, message = type(error).__name__, str(error)
        seconds = time.monotonic() - begin
        sent = torch.ops.ringspan._traffic(self.name)[0] - before
        calls = self.calls()
        of_all = self.share(calls)
        for _ in range(max(of_all) - calls):  # else one fault would hide all that follow
            torch.ops.ringspan._refuse(self.name, "the test catches up", False, self.calls())
        self.share(None)
        error = self.next_error()
        if not all(self.share(error <= EXACT)):
            self.group = self._spares.pop(0) if self._spares else None
        error = error if len(set(of_all)) == 1 else float("inf")
        return Told(kind, message[:KEPT], len(message), seconds, calls, sent, error)

    def next_error(self) -> float:
        """Of an ordinary call on this rank, against the oracle."""
        leaves, right = ordinary(self.rank, self.world)
        try:
            out = rs.attention(
                *leaves, mask=rs.causal(), shard_map=rs.ShardMap.head_tail(6, self.world), group=self.group
            )
        except Exception:
            return float("inf")
        return oracle.error(out.numpy(), right.numpy())


@functools.cache
def ordinary(rank: int, world: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's rows of q, k, v of an ordinary call in float64, and of the right answer."""
    q, k, v, _ = oracle.draw(5, 6, 4, 2, 8)
    result = oracle.attend(q, k, v, oracle.keep_of(("causal",), 6, 6))
    rows = oracle.holdings(("head_tail",), 6, world)[rank]
    *leaves, right = (torch.from_numpy(oracle.take_rows(x, rows)) for x in (q, k, v, result.out))
    return leaves, right


def faults_of_group(told: Iterable[Told], seconds: float = SECONDS) -> list[str]:
    """What is wrong with the group after a trial, or with the time that a rank took to raise."""
    told = list(told)
    found = []
    if len({one.calls for one in told}) > 1:
        found.append(f"the ranks have made {[one.calls for one in told]} calls")
    for rank, one in enumerate(told):
        if one.seconds > seconds:
            found.append(f"rank {rank} took {one.seconds:.2f} s")
        if not one.next_error <= EXACT:
            found.append(f"the next call of rank {rank} is off by {one.next_error:.3g}")
    return found


def faults_of_refusal(
    told: list[Told], words: Iterable[str] = (), kinds: Iterable[str] = ("ValueError",), seconds: float = SECONDS
) -> list[str]:
    """What is wrong with a call that all ranks had to refuse with messages that match all `words`."""
    found = faults_of_group(told, seconds)
    for rank, one in enumerate(told):
        if one.kind not in tuple(kinds):
            found.append(f"rank {rank} raised {one.kind}: {one.message[:300]}")
            continue
        missing = [word for word in words if not re.search(word, one.message, re.DOTALL)]
        if missing:
            found.append(f"rank {rank} is not told {missing}, but: {one.message[:600]}")
        if one.sent:
            found.append(f"rank {rank} had sent {one.sent} messages")
    return found


def by_trial(answers: list[list[Told]]) -> list[list[Told]]:
    """Answers of a pool, [rank][trial], the other way round."""
    return [list(one) for one in zip(*answers, strict=True)]

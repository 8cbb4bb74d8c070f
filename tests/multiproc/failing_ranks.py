"""Ranks that may die, stop or throw: processes of their own for one test, given commands and watched from outside.

    Ranks(3)  --- forks --->  rank 0   rank 1   rank 2        (failing_jobs.serve)
    StoreHost --- forks --->  the store                       (failing_jobs.serve_store)

All are forks of the server that `pool.forking_context` tells of. The store lives in a
process that no rank holds, so that the death of any rank leaves it alone, and so that it can be stopped by itself.

Commands are queued: a rank goes on to its next one as soon as it has answered the last. Nothing here waits without a
watchdog, and what is left of the processes is killed when the `with` block ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from failing_jobs import Join, Told, serve, serve_store
from pool import forking_context

WATCHDOG_S = 60.0
_POLL_S = 0.005  # how often it is looked whether a process was stopped

_context = forking_context()


@dataclass
class _Process:
    process: Any
    pipe: Connection
    told: list[Told] = field(default_factory=list)
    asked: int = 0
    ended: float | None = None  # when its pipe closed
    stopped: float | None = None  # when it was first seen stopped

    @property
    def is_busy(self) -> bool:
        return self.ended is None and len(self.told) < self.asked


class StoreHost:
    """A process that holds a TCPStore at `host`."""

    def __init__(self, use_libuv: bool = True, host: str = "127.0.0.1", namespace: str | None = None) -> None:
        ours, theirs = _context.Pipe()
        self._pipe = ours
        self.process = _context.Process(target=serve_store, args=(theirs, use_libuv, host, namespace), daemon=True)
        self.process.start()
        theirs.close()
        assert ours.poll(WATCHDOG_S), "the process of the store has not started"
        self.store = ("tcp", (host, ours.recv()))

    def signal(self, number: int) -> float:
        """Returns when it was sent."""
        os.kill(self.process.pid, number)
        return time.monotonic()

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.join()


class Ranks:
    """The processes of one test; a context manager."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="ringspan-ranks-")
        self._ranks: list[_Process] = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=serve, args=(theirs, rank, str(self._log(rank))), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(_Process(process, ours))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._ranks:
            one.pipe.close()
            one.process.kill()
        for one in self._ranks:
            one.process.join()
        self._folder.cleanup()

    def join(self, join: Join) -> None:
        """All ranks join one group. AssertionError where that fails."""
        self.do("join", join=join)

    def tell(self, rank: int, command: str, **arguments: Any) -> None:
        """Queues a command of one rank."""
        one = self._ranks[rank]
        one.asked += 1
        with contextlib.suppress(OSError):  # a rank that has ended is seen by its pipe
            one.pipe.send((command, arguments))

    def do(self, command: str, **arguments: Any) -> list[Any]:
        """The same command on every rank; their values. AssertionError where any rank raises, ends or hangs."""
        for rank in range(self.world):
            self.tell(rank, command, **arguments)
        assert self.wait(), f"{command} hangs\n{self.words()}"
        last = [self.last(rank) for rank in range(self.world)]
        wrong = [f"rank {rank}: {told}" for rank, told in enumerate(last) if told is None or told.kind]
        assert not wrong, f"{command} failed\n" + "\n".join(wrong) + "\n" + self.words()
        return [told.value for told in last]

    def wait(self, ranks: list[int] | None = None, within_s: float = WATCHDOG_S) -> bool:
        """Until these ranks (all) have answered everything, ended or were stopped. Whether they have in time."""
        chosen = self._ranks if ranks is None else [self._ranks[rank] for rank in ranks]
        end = time.monotonic() + within_s
        while any(one.is_busy and one.stopped is None for one in chosen) and time.monotonic() < end:
            self._look(_POLL_S)
        return not any(one.is_busy and one.stopped is None for one in chosen)

    def wait_for_end(self, rank: int, within_s: float = WATCHDOG_S) -> float | None:
        """When this rank's process ended, None where it has not in time."""
        end = time.monotonic() + within_s
        while self._ranks[rank].ended is None and time.monotonic() < end:
            self._look(_POLL_S)
        return self._ranks[rank].ended

    def _look(self, seconds: float) -> None:
        """Takes in what the processes say and what becomes of them."""
        pipes = {one.pipe: one for one in self._ranks if one.ended is None}
        for pipe in wait(list(pipes), timeout=seconds):
            one = pipes[pipe]
            try:
                one.told.append(pipe.recv())
            except (EOFError, OSError):
                one.ended = time.monotonic()
        for one in self._ranks:
            if one.ended is None and one.stopped is None and _state_of(one.process.pid) == "T":
                one.stopped = time.monotonic()

    def signal(self, rank: int, number: int) -> float:
        """Sends a signal to a rank; when that was. One that was stopped may be stopped again after SIGCONT."""
        if number == signal.SIGCONT:
            self._ranks[rank].stopped = None
        os.kill(self._ranks[rank].process.pid, number)
        return time.monotonic()

    def told(self, rank: int) -> list[Told]:
        """All that a rank has answered so far."""
        return list(self._ranks[rank].told)

    def last(self, rank: int) -> Told | None:
        """A rank's answer to the last command, None where it gave none."""
        one = self._ranks[rank]
        return one.told[-1] if len(one.told) == one.asked and one.told else None

    def ended(self, rank: int) -> float | None:
        """When this rank's process was seen to end."""
        return self._ranks[rank].ended

    def stopped(self, rank: int) -> float | None:
        """When this rank's process was seen to be stopped."""
        return self._ranks[rank].stopped

    def words(self) -> str:
        """The last words of every process, for a message."""
        return "\n".join(f"rank {rank} wrote: {self._log_text(rank)[-1000:]}" for rank in range(self.world))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"log-{rank}"

    def _log_text(self, rank: int) -> str:
        path = self._log(rank)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(line for line in lines if not line.startswith("frame #"))


def _state_of(pid: int) -> str:
    """R, S, T (stopped) and so on; "" of a process that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat[stat.rindex(")") + 2]

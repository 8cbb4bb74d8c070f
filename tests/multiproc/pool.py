"""Four real processes over gloo, started once and handed jobs by name.

A job is a function `job(group, **arguments)` of a module on the tests' path, named "module:function". It runs on ranks
0..world-1, each with the group of exactly those ranks, and its result comes back as a list in rank order. A job that
raises, or that takes longer than the watchdog allows, ends the processes; the next job finds fresh ones.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SIZE = 4
WATCHDOG_S = 60
GROUP_TIMEOUT = datetime.timedelta(seconds=40)
# What the fork server imports, once for all processes of a session. It starts no thread by that. The last two are what
# a first call imports (symbolic shapes) and what the judge draws with.
PRELOADED = ["torch", "torch.distributed", "ringspan", "torch.fx.experimental.symbolic_shapes", "numpy.random"]
_LAST_WORDS = 20000  # characters of a dead process's standard error that a failure shows
_PATHS = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "python")]


@dataclass(frozen=True)
class Fresh:
    """Groups made for one job: their timeout, whether ranks stand in reverse order of the processes, and how many.

    More than one come as a list.
    """

    timeout_s: float = 40
    reverse: bool = False
    count: int = 1


def forking_context() -> Any:
    """Makes processes that are forks of a server: they have imported torch, and begin without a thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Pool:
    """Starts its processes at the first job."""

    def __init__(self) -> None:
        self._context = forking_context()
        self._workers: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ringspan-pool-")
        self._store: Any = None

    def run(
        self,
        job: str,
        world: int,
        *,
        watchdog_s: float = WATCHDOG_S,
        may_die: tuple[int, ...] = (),
        fresh: Fresh | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Runs `job` on `world` ranks. AssertionError with every rank's traceback if one raises or the time is up.

        The processes of ranks in `may_die` may end (their result is how); fresh ones are started afterwards. With
        `fresh` the job also gets a new group of the same processes as its argument `fresh`.
        """
        self._start()
        # Every process takes part in making a group; those outside answer None.
        called = self._workers if fresh else self._workers[:world]
        for _, pipe in called:
            pipe.send((job, world, fresh, arguments))
        answers = self._collect(called, time.monotonic() + watchdog_s)[:world]
        failures = [
            f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good and rank not in may_die
        ]
        if failures or may_die:
            self.stop()
        if failures:
            raise AssertionError(f"{job} failed\n" + "\n".join(failures))
        return [value for _, value in answers]

    def stop(self) -> None:
        """Ends the processes of this pool."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers = []
        self._store = None

    def _start(self) -> None:
        if self._workers:
            return
        try:
            self._launch()
            answers = self._collect(self._workers, time.monotonic() + WATCHDOG_S)
            assert all(good for good, _ in answers), "\n".join(text for good, text in answers if not good)
        except BaseException:
            self.stop()  # else the next job would find processes whose first answer is that of the start
            raise

    def _launch(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(SIZE):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, rank, self._store.port, self._stacks(rank)), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _stacks(self, rank: int) -> str:
        return os.path.join(self._folder.name, f"stacks-{rank}")

    def _collect(self, members: list, deadline: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        pending = {pipe: rank for rank, (_, pipe) in enumerate(members)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    members[rank][0].join(5)
                    answers[rank] = False, self._last_words_of(members[rank][0], rank)
        for rank in pending.values():
            answers[rank] = False, "no answer in time\n" + self._stack_of(members[rank][0], rank)
        return [answers[rank] for rank in range(len(members))]

    def _last_words_of(self, process: Any, rank: int) -> str:
        text = Path(self._stacks(rank)).read_text(errors="replace")
        threads = re.split(r"^(?=SIG[A-Z]+\()", text, flags=re.MULTILINE)
        # PyTorch's handler writes every thread in the order of their numbers; the one that crashed runs the handler.
        crashed = [thread for thread in threads if "::fatalSignalHandler(" in thread]
        words = "".join([*crashed, *threads])[:_LAST_WORDS] if len(threads) > 1 else text[-_LAST_WORDS:]
        return f"the process ended with status {process.exitcode}\n{words}"

    def _stack_of(self, process: Any, rank: int) -> str:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        path = Path(self._stacks(rank))
        return path.read_text() if path.exists() else ""


def _serve(pipe: Connection, rank: int, port: int, stacks: str) -> None:
    """A worker's life: join the groups, then answer jobs until the pipe closes."""
    sys.path[:0] = _PATHS
    import torch
    import torch.distributed as dist
    from gloo_threads import use_one_thread

    use_one_thread()
    log = open(stacks, "w")  # noqa: SIM115  open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    # A crash tells where it was, in C++ too: the handler writes to standard error.
    os.dup2(log.fileno(), 2)
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=GROUP_TIMEOUT)
        groups = {world: dist.new_group(range(world), timeout=GROUP_TIMEOUT) for world in range(1, SIZE + 1)}
        pipe.send((True, None))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    made: list[Any] = []
    while True:
        try:
            job, world, fresh, arguments = pipe.recv()
        except EOFError:
            return
        # By now every rank has done with those of the last job. Each keeps threads of gloo busy.
        for group in made:
            dist.destroy_process_group(group)
        made = []
        try:
            if fresh:
                arguments["fresh"] = _make_group(fresh, world)
                made = _groups_in(arguments["fresh"])
            module, function = job.split(":")
            run = getattr(importlib.import_module(module), function)
            value = run(groups[world], **arguments) if rank < world else None
            pipe.send((True, value))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _groups_in(fresh: Any) -> list[Any]:
    """Those of a job that this process belongs to."""
    import torch.distributed as dist

    return [one for one in (fresh if isinstance(fresh, list) else [fresh]) if isinstance(one, dist.ProcessGroup)]


def _make_group(fresh: Fresh, world: int) -> Any:
    import torch.distributed as dist

    ranks = list(range(world))[:: -1 if fresh.reverse else 1]
    timeout = datetime.timedelta(seconds=fresh.timeout_s)
    groups = [dist.new_group(ranks, timeout=timeout, sort_ranks=False) for _ in range(fresh.count)]
    return groups[0] if fresh.count == 1 else groups

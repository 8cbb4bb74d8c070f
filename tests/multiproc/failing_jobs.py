"""What a rank that may fail does, command by command: see `failing_ranks.Ranks` for who gives the commands.

A rank keeps every result that it was given and compares it with the oracle when it is asked to, after all failures: a
message that comes late and is written into memory of a result is found too.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
import torch.distributed as dist
from cases import Case, expect, local_inputs, map_of, mask_of, positions_of, to_layout

import ringspan as rs

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Told:
    """How a command ended on a rank. Times are those of `time.monotonic`, which all processes of a machine share."""

    command: str
    began: float
    ended: float
    kind: str | None = None  # of the exception that left it, None where it returned
    message: str = ""
    value: Any = None

    @property
    def took(self) -> float:
        return self.ended - self.began

    def __str__(self) -> str:
        words = "returned" if self.kind is None else f"{self.kind}: {self.message[:400]}"
        return f"{self.command} after {self.took:.3f} s: {words}"


@dataclass(frozen=True)
class Join:
    """How a rank joins its group. `store`: (kind, where), see `store_of`; `namespace`: a file that is a network's."""

    store: tuple
    world: int
    timeout_s: float
    deadline_s: float | None = None
    interface: str = "lo"
    namespace: str | None = None


def store_of(kind: str, where: Any, timeout: datetime.timedelta) -> dist.Store:
    """A store of this kind: "tcp" at (host, port), "file" at a path, "prefix" of another one under a name."""
    if kind == "tcp":
        return dist.TCPStore(*where, is_master=False, timeout=timeout)
    if kind == "file":
        return dist.FileStore(where, -1)
    if kind == "prefix":
        return dist.PrefixStore("a name of the program's own", store_of(*where, timeout))
    raise AssertionError(kind)


def enter_namespace(path: str) -> None:
    """Makes the network of a process that started no thread the one behind `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns", path)
    os.close(descriptor)


def look_up_hosts_in_files() -> None:
    """Has this process ask no name server, where the C library is GNU's.

    A TCPStore looks up the name of whoever connects, and serves nobody meanwhile: with a name server that does not
    answer, that is 5 s and more for which the store seems lost.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


@dataclass
class Step:
    """One forward, and its backward if that was run."""

    case: Case
    group: dist.ProcessGroup
    leaves: list[torch.Tensor]
    dout: torch.Tensor
    out: torch.Tensor
    grads: list[torch.Tensor] = field(default_factory=list)


class Rank:
    """The commands. Each is called with what its name was sent with; what it returns is told."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.store: Any = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.steps: list[Step] = []
        self.pending: Step | None = None  # whose backward comes next

    def join(self, join: Join) -> None:
        """The world group, which commands call "world"."""
        if join.namespace is not None:
            enter_namespace(join.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = join.interface
        os.environ.pop("RINGSPAN_DEADLINE", None)
        if join.deadline_s is not None:
            os.environ["RINGSPAN_DEADLINE"] = str(join.deadline_s)
        timeout = datetime.timedelta(seconds=join.timeout_s)
        if self.store is None:
            self.store = store_of(*join.store, datetime.timedelta(seconds=30))
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=join.world, timeout=timeout)
        self.groups["world"] = dist.group.WORLD

    def set_deadline(self, seconds: float) -> None:
        rs.set_deadline(seconds)

    def add_group(self, name: str, ranks: list[int]) -> None:
        """Another group on the same store, with the timeout of the first."""
        self.groups[name] = dist.new_group(ranks)

    def forward(self, case: Case, group: str = "world") -> None:
        self.pending = None
        pg = self.groups[group]
        rank, world = pg.rank(), pg.size()
        q, k, v, dout, _ = local_inputs(case, rank, world)
        leaves = [to_layout(x, case.layout).requires_grad_() for x in (q, k, v)]
        out = rs.attention(
            *leaves,
            mask=mask_of(case.mask),
            shard_map=map_of(case.split, case.seq_len, world),
            group=pg,
            layout=case.layout,
            exchange=case.exchange,
            schedule=case.schedule,
        )
        self.pending = Step(case, pg, leaves, to_layout(dout, case.layout), out)
        self.steps.append(self.pending)

    def backward(self) -> bool:
        """Of the last forward; False where that has not returned."""
        step, self.pending = self.pending, None
        if step is not None:
            step.grads = list(torch.autograd.grad(step.out, step.leaves, step.dout))
        return step is not None

    def step(self, case: Case, group: str = "world") -> None:
        """Forward and backward."""
        self.forward(case, group)
        self.backward()

    def attend_in_threads(
        self, cases: list[Case], world: int, deadline_s: float, absent: int | None
    ) -> tuple[dict[str, float], list[Told | None]]:
        """One step of each case by ranks that are threads, over a HashStore; `absent` comes to the first one only.

        The errors, and how the last call of each rank ended if it raised.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["RINGSPAN_DEADLINE"] = str(deadline_s)
        store = dist.HashStore()
        told: list[Told | None] = [None] * world
        members = [Rank(rank) for rank in range(world)]

        def attend(rank: int) -> None:
            members[rank].groups["world"] = _group_of_thread(store, rank, world)
            for case in cases if rank != absent else cases[:1]:
                began = time.monotonic()
                try:
                    members[rank].step(case)
                except Exception as error:
                    told[rank] = Told("step", began, time.monotonic(), type(error).__name__, str(error))

        threads = [threading.Thread(target=attend, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors: dict[str, float] = {}
        for member in members:
            errors = {name: max(error, errors.get(name, 0.0)) for name, error in member.check().items()}
        return errors, told

    def check(self) -> dict[str, float]:
        """The largest error of each result, over everything that any call has returned."""
        worst: dict[str, float] = {}
        for step in self.steps:
            expected = expect(step.case, step.group.size())
            positions = positions_of(step.case, step.group.rank(), step.group.size())[0]
            results = dict(zip(("dq", "dk", "dv"), step.grads, strict=False)) | {"out": step.out.detach()}
            for name, got in results.items():
                right = getattr(expected, name)
                error = oracle.error(got.double().numpy(), oracle.take_rows(right, positions), right)
                worst[name] = max(worst.get(name, 0.0), error)
        return worst

    def count_places(self) -> None:
        """From now on places are counted from 0."""
        torch.ops.ringspan._set_trap(-1, "")

    def places(self) -> int:
        return torch.ops.ringspan._places()

    def trap(self, place: int, what: str) -> None:
        torch.ops.ringspan._set_trap(place, what)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def signal(self, number: int) -> None:
        """Sent to itself."""
        os.kill(os.getpid(), number)

    def leave(self) -> None:
        dist.destroy_process_group()
        self.groups.clear()

    def forget_addresses(self) -> int:
        """Removes from a TCPStore what gloo's rendezvous left of the group "0"; how many keys that were.

        gloo takes the addresses of an earlier group for those of the next: making one again on a store needs this, with
        and without this library.
        """
        keys = [key for key in self.store.list_keys() if key.startswith("0//cpu//")]
        for key in keys:
            self.store.delete_key(key)
        return len(keys)


def _group_of_thread(store: dist.Store, rank: int, world: int) -> dist.ProcessGroup:
    """The group as one of several ranks of a process sees it, under a name of its own: names are of the process."""
    timeout = datetime.timedelta(seconds=30)
    group = dist.ProcessGroup(store, rank, world)
    backend = dist.ProcessGroupGloo(store, rank, world, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    name = f"{id(store)}/{rank}"
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    return group


def serve(pipe: Any, rank: int, log: str) -> None:
    """A rank's life: commands are (name, arguments), each is answered by a `Told`; it ends with the pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    look_up_hosts_in_files()
    me = Rank(rank)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            value = getattr(me, name)(**arguments)
            told = Told(name, began, time.monotonic(), value=value)
        except Exception as error:
            told = Told(name, began, time.monotonic(), type(error).__name__, str(error))
            traceback.print_exc()
        pipe.send(told)


def serve_store(pipe: Any, use_libuv: bool, host: str, namespace: str | None) -> None:
    """A process that holds the store of a group and nothing else. It tells the port, and lives until the pipe ends."""
    if namespace is not None:
        enter_namespace(namespace)
    look_up_hosts_in_files()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    pipe.send(store.port)
    try:
        pipe.recv()
    except EOFError:
        # No destructor that waits: the program that held it is at its end.
        os.kill(os.getpid(), signal.SIGKILL)

"""Jobs of the pool in which several threads of each rank make calls in one group."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from trials import Arena, Told
from waiting_jobs import Attention, prepared, warm_arena

import ringspan as rs

WATCHDOG_S = 20


@dataclass
class Ended:
    """What a thread saw of its call: the error of its results against the oracle, or what it raised."""

    kind: str | None = None
    message: str = ""
    error: float = 0.0


def in_thread(call: Callable[[], Any], name: str = "the other") -> threading.Thread:
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(WATCHDOG_S)
    assert not thread.is_alive(), f"{thread.name} hangs"


def raised_in_thread(call: Callable[[], Any], name: str = "the other") -> None:
    """Runs it in a thread of that name and raises here what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    join(in_thread(run, name))
    if raised:
        raise raised[0]


def second_thread(group: dist.ProcessGroup, fresh: list, kinds: list[str], on_all: bool) -> dict[str, Told]:
    """A call made by another thread than those before, on rank 1 or on all ranks."""
    arena = warm_arena(group, fresh)
    found = {}
    for kind in kinds:
        call = prepared(arena.group, kind)
        moves = on_all or arena.rank == 1
        found[kind] = arena.trial(functools.partial(raised_in_thread, call) if moves else call)
    return found


def threads_one_after_another(group: dist.ProcessGroup, fresh: list, hand_over: bool) -> list[Told]:
    """Calls by four threads of which each ends before the next begins, and by this one at last."""
    arena = Arena(group, fresh)
    raised_in_thread(Attention(arena.group).forward, "the first")
    found = []
    for count in range(4):
        if hand_over:
            arena.share(None)
            rs.hand_over(arena.group)
            arena.share(None)
        call = Attention(arena.group, seed=count)
        name = f"thread {count}"
        found.append(_trial_of_thread(arena, call, name))
    return found


def _trial_of_thread(arena: Arena, call: Attention, name: str) -> Told:
    arena.share(None)
    kind, message = None, ""
    try:
        raised_in_thread(call.forward, name)
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    return Told(kind, message, len(message), 0.0, arena.calls(), 0, call.error() if kind is None else 0.0)


def handed_over(group: dist.ProcessGroup, fresh: dist.ProcessGroup) -> list[float]:
    """The group goes to another thread and back; calls of several kinds on the way. Errors."""
    calls = [Attention(fresh, seed) for seed in range(3)]
    calls[0].forward()

    def others() -> None:
        calls[1].forward()
        calls[1].backward()
        prepared(fresh, "unshard")()
        prepared(fresh, "loss")()

    for call in (others, calls[2].forward):
        dist.barrier(group)
        rs.hand_over(fresh)
        dist.barrier(group)
        if call is others:
            raised_in_thread(call)
        else:
            call()
    return [call.error() for call in calls]


def backward_elsewhere(group: dist.ProcessGroup, fresh: dist.ProcessGroup, checkpoints: bool) -> list[float]:
    """Forward here, backward in another thread, which may compute the forward again; then a forward here. Errors."""
    first, second = Attention(fresh, 1), Attention(fresh, 2)
    if checkpoints:
        plain = functools.partial(rs.attention, shard_map=first.smap, group=fresh)
        first.out = checkpoint(plain, *first.leaves, use_reentrant=False)
    else:
        first.forward()
    raised_in_thread(first.backward)
    second.forward()
    x = torch.ones(4, 3, requires_grad=True)
    summed = second.smap.unshard(x, group=fresh, dim=0, grad="sum").sum()
    raised_in_thread(summed.backward)
    world = dist.get_world_size(fresh)
    return [first.error(), second.error(), float((x.grad - world).abs().max())]


def crossed(group: dist.ProcessGroup, fresh: dist.ProcessGroup, overlap: bool, rounds: int) -> list[dict[str, Ended]]:
    """Two threads make one call each with equal arguments and other tensors; on odd ranks in the other order.

    With `overlap` both start at the same moment, and a rank's order is what the machine makes of it. For each round
    what became of thread "a" and of thread "b".
    """
    odd = dist.get_rank(group) % 2 == 1
    found = []
    for count in range(rounds):
        ends = {name: Ended() for name in "ab"}
        calls = {name: Attention(fresh, seed=2 * count + (name == "b")) for name in "ab"}
        meet = threading.Barrier(2)

        def run(name: str, ends: dict = ends, calls: dict = calls, meet: threading.Barrier = meet) -> None:
            try:
                if overlap:
                    meet.wait(WATCHDOG_S)
                calls[name].forward()
                ends[name].error = calls[name].error()
            except Exception as error:
                ends[name].kind, ends[name].message = type(error).__name__, str(error)

        dist.barrier(group)
        threads = []
        for name in "ba" if odd else "ab":
            threads.append(in_thread(functools.partial(run, name), name))
            if not overlap:
                join(threads[-1])
        for thread in threads:
            join(thread)
        found.append(ends)
        counts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, torch.ops.ringspan._calls(fresh.group_name), group=group)
        assert len(set(counts)) == 1, f"the ranks have made {counts} calls"
        rs.hand_over(fresh)
    return found


def two_forwards_at_once(group: dist.ProcessGroup, fresh: list, seconds: float) -> list[Ended]:
    """For a while each of two threads makes calls in a group of its own. The worst of each."""
    end, ends = time.monotonic() + seconds, [Ended(), Ended()]

    def run(index: int) -> None:
        try:
            for count in range(10_000):
                call = Attention(fresh[index], seed=count)
                call.forward()
                call.backward()
                ends[index].error = max(ends[index].error, call.error())
                enough = torch.tensor([float(time.monotonic() > end)])
                dist.all_reduce(enough, group=fresh[index])
                if enough.item() > 0:
                    return
        except Exception as error:
            ends[index].kind, ends[index].message = type(error).__name__, str(error)

    threads = [in_thread(functools.partial(run, index), f"of group {index}") for index in range(2)]
    for thread in threads:
        join(thread)
    return ends

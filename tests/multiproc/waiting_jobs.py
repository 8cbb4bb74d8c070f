"""Jobs of the pool in which some ranks wait for one: deadlines, warnings, interrupts. `trials` has what they tell."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import oracle
import torch
import torch.distributed as dist
from slow_steps import slow_steps
from trials import Arena, Told

import ringspan as rs

CALLS = ("forward", "backward", "unshard", "loss")
LATE_S = 0.7  # after the deadline: more than a busy machine makes of it
ROWS, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


@contextlib.contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Sets variables of this process for a while; None: not there."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set_environment(variables)
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def deadline(seconds: float | None, how: str = "set_deadline") -> Iterator[None]:
    """A deadline of this process, by `set_deadline` or by the "variable"; None: nothing changes."""
    if seconds is None:
        yield
    elif how == "variable":
        with environment(RINGSPAN_DEADLINE=str(seconds)):
            yield
    else:
        rs.set_deadline(seconds)
        try:
            yield
        finally:
            rs.set_deadline(None)


class Attention:
    """An attention call of fp32 tensors, so that `slow_steps` can run it, and what is right of it."""

    def __init__(self, group: dist.ProcessGroup, seed: int = 3, **options: Any) -> None:
        self.rank, world = dist.get_rank(group), dist.get_world_size(group)
        length = ROWS * world
        self.smap, self.group, self._options = rs.ShardMap.contiguous(length, world), group, options
        drawn = [x.astype("float32").astype("float64") for x in oracle.draw(seed, length, HEADS, KV_HEADS, DIM)]
        q, k, v, dout = drawn
        self._right = oracle.attend(q, k, v, oracle.keep_of(("full",), length, length), dout)
        local = [self.smap.shard(torch.from_numpy(x).float(), self.rank, 2) for x in drawn]
        self.leaves, self.dout = [x.requires_grad_() for x in local[:3]], local[3]
        self.out: Any = None

    def forward(self) -> None:
        self.out = rs.attention(*self.leaves, shard_map=self.smap, group=self.group, **self._options)

    def backward(self) -> None:
        self.out.backward(self.dout)

    def error(self) -> float:
        """The largest relative error of all that was computed."""
        rows = range(ROWS * self.rank, ROWS * (self.rank + 1))
        found, right = [self.out.detach()], [self._right.out]
        if self.leaves[0].grad is not None:
            found += [leaf.grad for leaf in self.leaves]
            right += [self._right.dq, self._right.dk, self._right.dv]
        pairs = zip(found, right, strict=True)
        return max(oracle.error(one.double().numpy(), whole[:, :, list(rows)], whole) for one, whole in pairs)


def prepared(group: dist.ProcessGroup, kind: str, **options: Any) -> Callable[[], Any]:
    """A call of the group that is yet to be made, one of CALLS; what comes before it has been made."""
    attention = Attention(group, **options)
    if kind == "forward":
        return attention.forward
    if kind == "backward":
        attention.forward()
        return attention.backward
    if kind == "unshard":
        return functools.partial(attention.smap.unshard, torch.ones(ROWS, 3), group=group, dim=0)
    if kind == "backward of unshard":
        x = torch.ones(ROWS, 3, requires_grad=True)
        return attention.smap.unshard(x, group=group, dim=0, grad="sum").sum().backward
    call = functools.partial(rs.masked_mean_loss, torch.ones(5), torch.ones(5, dtype=torch.bool))
    call(group=rs.LOCAL)  # what PyTorch imports for it takes a second
    return functools.partial(call, group=group)


def warm_arena(group: dist.ProcessGroup, fresh: list) -> Arena:
    """One whose groups have made a call: by the first one they connect, which takes seconds on some machines."""
    for one in fresh:
        Attention(one).forward()
    return Arena(group, fresh)


def _late_by(told: Told, seconds: float) -> Told:
    """What a rank saw once it had come."""
    return dataclasses.replace(told, seconds=told.seconds - seconds)


def one_is_absent(
    group: dist.ProcessGroup, fresh: list, deadline_s: float | None, how: str, kinds: list[str], waits_s: float
) -> dict[str, Told]:
    """The last rank comes to each call when the others, who wait `waits_s`, have given up."""
    arena = warm_arena(group, fresh)
    pause = waits_s + LATE_S if arena.rank == arena.world - 1 else 0.0
    found = {}
    for kind in kinds:
        call = prepared(arena.group, kind)

        def act(call: Callable[[], Any] = call) -> None:
            time.sleep(pause)
            with deadline(deadline_s, how):
                call()

        found[kind] = _late_by(arena.trial(act), pause)
    return found


def bad_deadlines(
    group: dist.ProcessGroup, fresh: list, how: str, seconds: list[Any], on_all: bool, kinds: list[str]
) -> dict[str, Told]:
    """Deadlines that are refused by the next call, on rank 1 or on all ranks."""
    arena = warm_arena(group, fresh)
    found = {}
    for kind in kinds:
        for value in seconds:
            call = prepared(arena.group, kind)
            wrong = value if on_all or arena.rank == 1 else None

            def act(call: Callable[[], Any] = call, wrong: Any = wrong) -> None:
                with deadline(wrong, how):
                    call()

            if not arena.is_used_up:
                found[f"{kind}, {value}"] = arena.trial(act)
    return found


def a_deadline_as_long_as_the_timeout(group: dist.ProcessGroup, fresh: dist.ProcessGroup, seconds: float) -> float:
    """The error of a call; also of one with an empty variable."""
    worst = 0.0
    for how, value in (("set_deadline", seconds), ("variable", seconds), ("variable", "")):
        with deadline(value, how):
            call = Attention(fresh)
            call.forward()
            worst = max(worst, call.error())
    return worst


def set_deadline_goes_first(group: dist.ProcessGroup, fresh: list, seconds: float) -> Told:
    """The variable says less than nothing, set_deadline `seconds`, and the last rank is absent."""
    arena = warm_arena(group, fresh)
    pause = seconds + LATE_S if arena.rank == arena.world - 1 else 0.0
    call = prepared(arena.group, "forward")

    def act() -> None:
        time.sleep(pause)
        with environment(RINGSPAN_DEADLINE="-7"), deadline(seconds):
            call()

    return _late_by(arena.trial(act), pause)


def one_is_slow(
    group: dist.ProcessGroup, fresh: list, deadline_s: float, pauses: list[float], backward: bool, exchange: str
) -> tuple[Told, float]:
    """The steps of the last rank take their time. What was seen of two calls, and the error of their results."""
    arena = warm_arena(group, fresh)
    calls = [Attention(arena.group, seed, exchange=exchange) for seed in (3, 4)]
    calls[0].forward()
    slow = pauses if arena.rank == arena.world - 1 else []

    def act() -> None:
        with deadline(deadline_s), slow_steps(slow):
            calls[0].backward() if backward else calls[0].forward()
            calls[1].forward()

    told = arena.trial(act)
    errors = [call.error() for call in calls if call.out is not None] if told.kind is None else [0.0]
    return told, max(errors)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """What the logger "ringspan" warns of meanwhile."""
    kept, logger = _Kept(), logging.getLogger("ringspan")
    logger.addHandler(kept)
    try:
        yield kept.texts
    finally:
        logger.removeHandler(kept)


def warned(
    group: dist.ProcessGroup, fresh: list, pause_s: float, times: tuple[float, float], place: str, exchange: str
) -> tuple[Told, list[str]]:
    """The warnings of a call for which the last rank is late, or in which its first step is slow."""
    arena = warm_arena(group, fresh)
    first, call = (Attention(arena.group, exchange=exchange) for _ in range(2))
    first.forward()
    is_last = arena.rank == arena.world - 1

    def act() -> None:
        if is_last and place == "agreement":
            time.sleep(pause_s)
        with slow_steps([pause_s] if is_last and place == "exchange" else []):
            call.forward()

    arena.share(None)
    torch.ops.ringspan._set_warning_times(*times)
    try:
        with warnings_kept() as texts:
            told = arena.trial(act)
    finally:
        torch.ops.ringspan._set_warning_times(30.0, 300.0)
    return told, texts


@contextlib.contextmanager
def _interrupted_after(seconds: float | None) -> Iterator[None]:
    """SIGINT to this process after a while."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds or 0.0, os.kill, (os.getpid(), signal.SIGINT))
    try:
        if seconds is not None:
            timer.start()
        yield
    finally:
        timer.cancel()
        if seconds is not None:
            timer.join()
        signal.signal(signal.SIGINT, before)


def interrupted(
    group: dist.ProcessGroup, fresh: list, place: str, kind: str, exchange: str, times: tuple[float, float]
) -> Told:
    """Rank 0 gets a SIGINT after times[0] seconds while it waits for the last rank, for times[1] seconds.

    place: "agreement" or "exchange". Seconds are those since the signal, on the last rank since it ended its pause.
    """
    arena = warm_arena(group, fresh)
    signal_s, pause_s = times
    is_last = arena.rank == arena.world - 1
    call = prepared(arena.group, kind, exchange=exchange)

    def act() -> None:
        if is_last and place == "agreement":
            time.sleep(pause_s)
        with slow_steps([pause_s] if is_last and place == "exchange" else []):
            call()

    with _interrupted_after(signal_s if arena.rank == 0 else None):
        told = arena.trial(act)
    return _late_by(told, pause_s if is_last else signal_s)


def counted_meanwhile(group: dist.ProcessGroup, fresh: list, place: str, exchange: str, pause_s: float) -> float:
    """The longest time for which another Python thread stood still while this one waited; 0 on the last rank."""
    arena = warm_arena(group, fresh)
    is_last = arena.rank == arena.world - 1
    call = Attention(arena.group, exchange=exchange)
    call.forward()
    ticks, ends = [time.monotonic()], threading.Event()

    def count() -> None:
        while not ends.is_set():
            time.sleep(0.005)
            ticks.append(time.monotonic())

    arena.share(None)
    if is_last and place == "agreement":
        time.sleep(pause_s)
    thread = threading.Thread(target=count)
    if not is_last:
        thread.start()
    with slow_steps([pause_s] if is_last and place == "exchange" else []):
        call.forward()
    if is_last:
        return 0.0
    ends.set()
    thread.join()
    assert ticks[-1] - ticks[0] > 0.7 * pause_s, "this rank has not waited"
    assert call.error() < 1e-5
    return max(after - before for before, after in itertools.pairwise(ticks))

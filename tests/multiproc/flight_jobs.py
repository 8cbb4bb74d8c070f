"""Jobs of the pool that read the flight record: after good calls, after failures, and from the files that it writes."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slow_steps import slow_steps
from thread_jobs import in_thread, join
from waiting_jobs import ROWS, Attention, deadline, environment

import ringspan as rs


def entries(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Those of a group, as plain data."""
    return [asdict(entry) for entry in rs.flight_record() if entry.group == group.group_name]


def attend(call: Attention) -> torch.Tensor:
    # The place of the call is this function, 2 lines below its first.
    return rs.attention(*call.leaves, shard_map=call.smap, group=call.group)


def attend_twice(call: Attention) -> torch.Tensor:
    attend(call)
    return rs.attention(*call.leaves, shard_map=call.smap, group=call.group, scale=0.5)


class Layer(torch.nn.Module):
    """A module: PyTorch's own frames stand between the program and the call."""

    def __init__(self, call: Attention) -> None:
        super().__init__()
        self.call = call

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return rs.attention(query, *self.call.leaves[1:], shard_map=self.call.smap, group=self.call.group)


@dataclass
class Record:
    """What the record held after calls that went well, and the times before and after all."""

    began: float
    entries: list[dict[str, Any]]
    ended: float


def good_calls(group: dist.ProcessGroup, fresh: dist.ProcessGroup) -> Record:
    """Of every kind, from places of every kind; one is refused."""
    call = Attention(fresh)
    began = time.time()
    attend(call).backward(call.dout)  # 1, 2
    attend_twice(call)  # 3, 4
    Layer(call)(call.leaves[0])  # 5
    (lambda: rs.attention(*call.leaves, shard_map=call.smap, group=fresh))()  # 6
    x = torch.ones(ROWS, 3, requires_grad=True)
    call.smap.unshard(x, group=fresh, dim=0, grad="sum").sum().backward()  # 7, 8
    rs.masked_mean_loss(torch.ones(3), torch.ones(3, dtype=torch.bool), group=fresh)  # 9
    with contextlib.suppress(ValueError):
        rs.attention(*call.leaves, group=fresh, scale=float("nan") if dist.get_rank(group) == 1 else None)  # 10
    with contextlib.suppress(ValueError):
        rs.attention(*call.leaves, group=fresh, scale=0.5 if dist.get_rank(group) == 1 else 0.25)  # 11
    rs.attention(*call.leaves, shard_map=call.smap, group=fresh, assume_agreed=True)
    return Record(began, entries(fresh), time.time())


def compiled(group: dist.ProcessGroup, fresh: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Forward and backward within compiled code."""
    call = Attention(fresh)
    torch._dynamo.reset()
    run = torch.compile(functools.partial(rs.attention, shard_map=call.smap, group=fresh), backend="aot_eager")
    call.out = run(*call.leaves)
    call.backward()
    assert call.error() < 1e-5
    return entries(fresh)


def many(group: dist.ProcessGroup, fresh: dist.ProcessGroup, count: int) -> list[int]:
    """The numbers that are left of so many calls."""
    x = torch.ones(1, 1, 1, 8)
    for _ in range(count):
        rs.attention(x, x, x, group=fresh)
    return [entry["number"] for entry in entries(fresh)]


@dataclass
class Failed:
    """What a rank saw of a call that failed, and its file."""

    kind: str | None
    message: str
    seconds: float
    entries: list[dict[str, Any]]
    file: dict[str, Any] | None


def _failed(call: Callable[[], Any], group: dist.ProcessGroup, path: str) -> Failed:
    begin, kind, message = time.monotonic(), None, ""
    with environment(RINGSPAN_FLIGHT_RECORD=path or None):
        try:
            call()
        except Exception as error:
            kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - begin
    written = Path(path.replace("%r", str(dist.get_rank())))
    file = json.loads(written.read_text()) if path and written.is_file() else None
    return Failed(kind, message, seconds, entries(group), file)


def failing(group: dist.ProcessGroup, fresh: dist.ProcessGroup, way: str, exchange: str, path: str = "") -> Failed:
    """After two good calls the last rank fails in a third: by what a step throws ("throw"), or by its absence, seen by
    the deadline, which leaves the group usable ("absent").
    """
    call = Attention(fresh, exchange=exchange)
    is_last = dist.get_rank(fresh) == dist.get_world_size(fresh) - 1
    call.forward()
    call.backward()
    dist.barrier(group)
    if way == "absent":
        with deadline(0.5):
            time.sleep(1.5 if is_last else 0.0)
            return _failed(call.forward, fresh, path)
    if is_last:
        # Where the others need one more message of this rank: its only one, or the second.
        torch.ops.ringspan._set_trap(0 if exchange == "all_gather" else 1, "throw")
    try:
        return _failed(call.forward, fresh, path)
    finally:
        torch.ops.ringspan._set_trap(-1, "")


def reached(group: dist.ProcessGroup, fresh: dist.ProcessGroup, exchange: str) -> list[str]:
    """What this rank's record says of where it is, while the last rank computes its first step. "" on that rank."""
    call = Attention(fresh, exchange=exchange)
    call.forward()
    is_last = dist.get_rank(fresh) == dist.get_world_size(fresh) - 1
    seen: list[str] = []

    def look() -> None:
        time.sleep(1.0)
        entry = entries(fresh)[-1]
        seen.extend([entry["outcome"], entry["transfer"], str(entry["step"]), str(entry["ended"])])

    dist.barrier(group)
    thread = in_thread(look)
    with slow_steps([3.0] if is_last else []):
        call.forward()
    join(thread)
    return seen

"""Jobs of the pool in which the ranks do not make the same call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ringspan as rs


@dataclass
class Outcome:
    """What one rank saw: the exception (None without one), how long it took, and whether the group still works."""

    kind: str | None
    message: str
    seconds: float
    usable: bool


def tensors(rows: int = 8, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v of this rank."""
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(1, count, rows, 8, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)]


def outcome_of(call: Callable[[], object], group: dist.ProcessGroup | None) -> Outcome:
    """Runs `call`; then, where a group is given, an ordinary call on it."""
    begin, kind, message = time.monotonic(), None, ""
    try:
        call()
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    seconds = time.monotonic() - begin
    usable = False
    if group is not None:
        out = rs.attention(*tensors(), mask=rs.causal(), group=group)
        usable = bool(torch.isfinite(out).all())
    return Outcome(kind, message, seconds, usable)


def one_differs(group: dist.ProcessGroup, what: str, exchange: str) -> Outcome:
    """Rank 0 makes another call than the others; `what` says how it differs."""
    world = dist.get_world_size(group)
    odd = dist.get_rank(group) == 0
    inputs, options = tensors(), {"mask": rs.causal()}
    if what == "rows":
        inputs = tensors(rows=6 if odd else 8)
    elif what == "rows of a map":
        lengths = [8] * (world - 1)
        options["shard_map"] = rs.ShardMap.from_lengths([8 if odd else 9, *lengths])
    elif what == "query heads":
        inputs = tensors(heads=8 if odd else 4)
    elif what == "key heads":
        inputs = tensors(kv_heads=1 if odd else 2)
    elif what == "mask":
        options["mask"] = rs.full() if odd else rs.causal()
    elif what == "window":
        options["mask"] = rs.window(3 if odd else 4)
    elif what == "documents":
        options["mask"] = rs.documents(lengths=[4 if odd else 5, 8 * world - 5])
    elif what == "map":
        options["shard_map"] = (rs.ShardMap.striped if odd else rs.ShardMap.contiguous)(8 * world, world)
    elif what == "dtype":
        inputs = tensors(dtype=torch.bfloat16 if odd else torch.float32)
    elif what == "scale":
        options["scale"] = 0.5 if odd else 0.25
    elif what == "exchange":
        exchange = "all_gather" if odd else "p2p"
    elif what == "gradients":
        inputs = [x.requires_grad_(odd) for x in inputs]
    elif what == "softcap":
        options["softcap"] = 30.0 if odd else 20.0
    elif what == "dropout":
        options |= {"dropout_p": 0.5 if odd else 0.25, "seed": 3}
    elif what == "bias":
        options["bias"] = torch.zeros(1, 8 * world) if odd else None
    elif what == "layout":
        options["layout"] = "BSND" if odd else "BNSD"
        inputs = [torch.zeros(1, 4, 4, 8) for _ in range(3)]
    else:
        raise AssertionError(what)
    return outcome_of(lambda: rs.attention(*inputs, group=group, exchange=exchange, **options), group)


def one_is_refused(group: dist.ProcessGroup, what: str) -> Outcome:
    """Rank 0 makes a call that is wrong by itself; the others make a right one."""
    odd = dist.get_rank(group) == 0
    world = dist.get_world_size(group)
    inputs, options = tensors(), {}
    if odd:
        if what == "scale":
            options["scale"] = float("nan")
        elif what == "dtype mix":
            inputs[1] = inputs[1].double()
        elif what == "dimensions":
            inputs[0] = inputs[0][0]
        elif what == "schedule":
            options.update(schedule="ulysses", exchange="all_gather")
        elif what == "rows of a mask":
            options["attn_mask"] = torch.ones(7, 8 * world, dtype=torch.bool)
        elif what == "map of another world":
            options["shard_map"] = rs.ShardMap.contiguous(8 * world, world + 1)
        elif what == "rows against the map":
            inputs = tensors(rows=7)
            options["shard_map"] = rs.ShardMap.contiguous(8 * world, world)
        elif what == "document lengths":
            options["mask"] = rs.documents(lengths=torch.tensor([-3, 8 * world + 3]))
        else:
            raise AssertionError(what)
    return outcome_of(lambda: rs.attention(*inputs, group=group, **options), group)


def one_repeats(group: dist.ProcessGroup) -> Outcome:
    """All make call A; then rank 0 makes A again while the others go on to B."""
    rs.attention(*tensors(8), group=group)
    rows = 8 if dist.get_rank(group) == 0 else 16
    return outcome_of(lambda: rs.attention(*tensors(rows), group=group), group)


def backwards_in_another_order(group: dist.ProcessGroup) -> Outcome:
    """Two forwards of equal shape; rank 0 goes backward through the first, the others through the second."""
    leaves = [[x.requires_grad_() for x in tensors()] for _ in range(2)]
    outs = [rs.attention(*inputs, mask=rs.causal(), group=group) for inputs in leaves]
    chosen = 0 if dist.get_rank(group) == 0 else 1
    return outcome_of(lambda: outs[chosen].sum().backward(), group)


def forward_meets_backward(group: dist.ProcessGroup) -> Outcome:
    """Rank 0 makes a second forward while the others go backward."""
    inputs = [x.requires_grad_() for x in tensors()]
    out = rs.attention(*inputs, mask=rs.causal(), group=group)
    if dist.get_rank(group) == 0:
        return outcome_of(lambda: rs.attention(*tensors(), mask=rs.causal(), group=group), group)
    return outcome_of(lambda: out.sum().backward(), group)


def unshard_differs(group: dist.ProcessGroup) -> Outcome:
    """Rank 0 gathers a tensor of another width."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    smap = rs.ShardMap.contiguous(8 * world, world)
    x = torch.zeros(8, 3 if rank == 0 else 4)
    return outcome_of(lambda: smap.unshard(x, group=group, dim=0), group)


def one_never_calls(group: dist.ProcessGroup, fresh: dist.ProcessGroup, backward: bool) -> Outcome:
    """The last rank stays away, in forward or in backward only."""
    absent = dist.get_rank(group) == dist.get_world_size(group) - 1
    inputs = [x.requires_grad_(backward) for x in tensors()]
    if not backward:
        call = lambda: rs.attention(*inputs, group=fresh)  # noqa: E731
    else:
        out = rs.attention(*inputs, mask=rs.causal(), group=fresh)
        call = out.sum().backward
    return Outcome(None, "", 0.0, True) if absent else outcome_of(call, None)


def one_dies(group: dist.ProcessGroup, fresh: dist.ProcessGroup) -> Outcome:
    """The last rank ends its process after one good call."""
    rs.attention(*tensors(), group=fresh)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        os._exit(7)
    return outcome_of(lambda: rs.attention(*tensors(), group=fresh), None)


def alternate(group: dist.ProcessGroup, fresh: dist.ProcessGroup, rounds: int, exchanges: list[str]) -> float:
    """Forward and backward again and again, alternating two groups, lengths and exchanges. The largest error."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    rights: dict[int, list[torch.Tensor]] = {}
    worst = 0.0
    for count in range(rounds):
        seq_len = (13, 32, 5)[count % 3]
        smap = rs.ShardMap.head_tail(seq_len, world)
        generator = torch.Generator().manual_seed(seq_len)
        whole = [torch.randn(1, heads, seq_len, 8, generator=generator) for heads in (4, 2, 2)]
        leaves = [smap.shard(x, rank, 2).requires_grad_() for x in whole]
        out = rs.attention(
            *leaves,
            mask=rs.causal(),
            shard_map=smap,
            group=(group, fresh)[count % 2],
            exchange=exchanges[count % len(exchanges)],
        )
        got = [out.detach(), *torch.autograd.grad(out.sum(), leaves)]
        right = rights.setdefault(seq_len, got)
        worst = max(
            [worst, *(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(got, right, strict=True))]
        )
    return worst

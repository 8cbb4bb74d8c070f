"""Jobs of the pool that hold the ledger against what was really posted and held."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ring_jobs import peak_of
from torch.utils._python_dispatch import TorchDispatchMode
from user_jobs import place_of

import ringspan as rs
from ringspan import _ops

BATCH, Q_HEADS, KV_HEADS, SEQ_LEN, QK_DIM, V_DIM = 2, 4, 2, 19, 8, 5


@dataclass(frozen=True)
class Counted:
    """One call: what each way of counting says, [messages, bytes] of forward and of backward."""

    case: str
    posted: list[tuple[int, int]]
    ledger: list[tuple[int, int]]


def map_of(name: str, world: int) -> rs.ShardMap:
    """A split of SEQ_LEN tokens; "uneven" leaves rank 0 empty where there are others."""
    if name != "uneven":
        return getattr(rs.ShardMap, name)(SEQ_LEN, world)
    lengths = [0] + [1] * (world - 1) if world > 1 else [0]
    lengths[-1] += SEQ_LEN - sum(lengths)
    return rs.ShardMap.from_lengths(lengths)


def counted(group: dist.ProcessGroup, splits: list[str], exchanges: list[str], dtypes: list[str]) -> list[Counted]:
    """Forward and backward of every combination, causal and grouped heads, Dv != Dqk."""
    rank, world = place_of(group)
    found = []
    for split in splits:
        smap = map_of(split, world)
        rows = len(smap.positions(rank))
        for exchange in exchanges:
            for dtype in dtypes:
                kind = getattr(torch, dtype)
                shapes = ((Q_HEADS, QK_DIM), (KV_HEADS, QK_DIM), (KV_HEADS, V_DIM))
                leaves = [torch.randn(BATCH, heads, rows, dim, dtype=kind).requires_grad_() for heads, dim in shapes]
                with rs.count_traffic(group) as forward:
                    out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group, exchange=exchange)
                with rs.count_traffic(group) as backward:
                    out.backward(torch.ones_like(out))
                sizes = [(BATCH, heads, SEQ_LEN, dim) for heads, dim in shapes]
                plan = rs.plan(*sizes, dtype=kind, mask=rs.causal(), shard_map=smap, exchange=exchange)
                ledger = plan.ledger().rank(rank)
                found.append(
                    Counted(
                        f"{split} {exchange} {dtype} rank {rank}",
                        [(pass_.messages, pass_.sent_bytes) for pass_ in (forward, backward)],
                        [(pass_.messages, pass_.sent_bytes) for pass_ in (ledger.forward, ledger.backward)],
                    )
                )
    return found


def schedule_matches(group: dist.ProcessGroup, schedule: str, exchange: str, dtype: str) -> str:
    """What this rank's ledger and what it posted differ in, "" where they agree."""
    rank, world = place_of(group)
    kind = getattr(torch, dtype)
    shapes = ((Q_HEADS, QK_DIM), (KV_HEADS, QK_DIM), (KV_HEADS, V_DIM))
    for split in ("head_tail", "uneven"):
        smap = map_of(split, world)
        rows = len(smap.positions(rank))
        leaves = [torch.randn(BATCH, heads, rows, dim, dtype=kind).requires_grad_() for heads, dim in shapes]
        how = {"mask": rs.causal(), "shard_map": smap, "exchange": exchange, "schedule": schedule}
        with rs.count_traffic(group) as forward:
            out = rs.attention(*leaves, group=group, **how)
        with rs.count_traffic(group) as backward:
            out.backward(torch.ones_like(out))
        sizes = [(BATCH, heads, SEQ_LEN, dim) for heads, dim in shapes]
        ledger = rs.plan(*sizes, dtype=kind, **how).ledger().rank(rank)
        for name, posted, planned in (("forward", forward, ledger.forward), ("backward", backward, ledger.backward)):
            if (posted.messages, posted.sent_bytes) != (planned.messages, planned.sent_bytes):
                return f"{split} {name}: posted {posted}, planned {planned.messages}, {planned.sent_bytes}"
    return ""


class _Collectives(TorchDispatchMode):
    """Bytes to other ranks, added up from the arguments of the collectives themselves."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.messages, self.sent_bytes = world, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        ops = torch.ops._c10d_functional
        copies = {ops.all_to_all_single.default: 1, ops.all_gather_into_tensor.default: self.world - 1}.get(func)
        if copies is not None:
            self.messages += 1
            self.sent_bytes += copies * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


@functools.cache
def _let_collectives_be_seen() -> None:
    _ops.let_see_inside(_Collectives)


def counter_counts_what_is_posted(group: dist.ProcessGroup) -> bool:
    """`count_traffic` against the dispatcher, which sees the collectives on their way to PyTorch."""
    _let_collectives_be_seen()
    rank, world = place_of(group)
    smap, same = rs.ShardMap.head_tail(SEQ_LEN, world), []
    for exchange in ("all_to_all", "all_gather"):
        rows = len(smap.positions(rank))
        leaves = [torch.randn(1, 2, rows, 8).requires_grad_() for _ in range(3)]
        with _Collectives(world) as seen, rs.count_traffic(group) as traffic:
            out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group, exchange=exchange)
            out.backward(torch.ones_like(out))
        same.append((seen.messages, seen.sent_bytes) == (traffic.messages, traffic.sent_bytes) and seen.messages > 0)
    return all(same)


def peaks(group: dist.ProcessGroup, exchange: str, dtype: str, schedule: str = "auto") -> list[tuple[int, int, int]]:
    """For both passes: most bytes that live at once in PyTorch's CPU allocator, and the ledger's bounds of them.

    The ledger's without what the core takes from the system itself: delta, and sums of 16-bit results in fp32. A
    collective's sent message may live a moment longer than its wait, on gloo's thread, and all_gather also holds all
    that came twice for a while.
    """
    rank, world = place_of(group)
    rows, kind = 512, getattr(torch, dtype)
    smap = rs.ShardMap.contiguous(rows * world, world)
    leaves = [torch.randn(1, heads, rows, 64).to(kind).requires_grad_() for heads in (4, 2, 2)]
    dout = torch.randn(1, 4, rows, 64).to(kind)

    how = {"mask": rs.causal(), "shard_map": smap, "exchange": exchange, "schedule": schedule}

    def call() -> torch.Tensor:
        return rs.attention(*leaves, group=group, **how)

    call().backward(dout)
    for leaf in leaves:
        leaf.grad = None
    kept = call()
    found = [peak_of(call), peak_of(lambda: kept.backward(dout))]
    sizes = [(1, heads, rows * world, 64) for heads in (4, 2, 2)]
    ledger = rs.plan(*sizes, dtype=kind, **how).ledger().rank(rank)
    sums = 4 * rows * 64 * 4 if dtype == "bfloat16" else 0
    pair = 2 * 2 * rows * 64
    late = {"p2p": 0, "all_to_all": pair * 4, "all_gather": (world + 1) * pair * leaves[0].element_size()}[exchange]
    early = pair * leaves[0].element_size() if exchange == "all_gather" else 0
    # Gradients of K and V that stay at home; the ring's collective sends them off with the first step.
    stays_home = dtype == "bfloat16" and (world == 1 or exchange != "all_to_all")
    expected = (
        ledger.forward.peak_bytes - (sums if world > 1 else 0),
        ledger.backward.peak_bytes - sums - 4 * rows * 4 - (pair * 4 if stays_home else 0),
    )
    if world == 1:
        late = early = 0
    return [(held, least - early, least + late) for held, least in zip(found, expected, strict=True)]

"""Jobs of the pool on stand-ins for an accelerator's ops."""

from __future__ import annotations

import ring_jobs
import standins
import torch
import torch.distributed as dist
from cases import Case, errors_of
from user_jobs import place_of

import ringspan as rs


def errors(group: dist.ProcessGroup, kind: str, cases: list[Case]) -> tuple[list[dict[str, float]], dict[str, int]]:
    """`errors_of` for each case, and the calls of each op."""
    rank, world = place_of(group)
    with standins.accelerator(kind) as calls:
        found = [errors_of(case, group, rank, world) for case in cases]
    return found, dict(calls)


def collectives(group: dist.ProcessGroup, kind: str, exchange: str) -> dict[str, dict[str, int]]:
    """As `ring_jobs.collectives`."""
    with standins.accelerator(kind):
        return ring_jobs.collectives(group, exchange, inference=False)


def mixed(group: dist.ProcessGroup, kind: str) -> float:
    """Rank 0 runs the steps, the others this library's kernels: they exchange the same messages."""
    rank, world = place_of(group)
    smap = rs.ShardMap.head_tail(24, world)
    *leaves, dout = ring_jobs.shards_of(smap, rank, 5)
    results = []
    for kinds in ((), (kind,)):
        with standins.accelerator(kind) if kinds and rank == 0 else torch.enable_grad():
            out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group)
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
    return max(float((one - two).abs().max()) for one, two in zip(*results, strict=True))


def backwards_in_any_order(group: dist.ProcessGroup, kind: str) -> bool:
    """Forwards without backward, and backwards in the order of their forwards, change no bit."""
    rank, world = place_of(group)
    smap = rs.ShardMap.head_tail(16, world)
    inputs = [ring_jobs.shards_of(smap, rank, seed) for seed in range(3)]

    def forward(index: int) -> torch.Tensor:
        return rs.attention(*inputs[index][:3], mask=rs.causal(), shard_map=smap, group=group)

    with standins.accelerator(kind):
        alone = [torch.autograd.grad(forward(i), inputs[i][:3], inputs[i][3]) for i in range(3)]
        outs = [forward(i) for i in range(3)]
        with torch.no_grad():
            forward(0)
        found = [torch.autograd.grad(outs[i], inputs[i][:3], inputs[i][3]) for i in range(3)]
    return all(torch.equal(a, b) for x, y in zip(alone, found, strict=True) for a, b in zip(x, y, strict=True))

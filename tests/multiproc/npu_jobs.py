"""Jobs of the pool with the stand-in for torch_npu installed."""

from __future__ import annotations

import contract_jobs
import torch
import torch.distributed as dist
from ringspan.compat import torch_npu as compat
from user_jobs import place_of

import ringspan as rs


def errors(group: dist.ProcessGroup, **call: object) -> tuple[dict, dict[str, int]]:
    """`contract_jobs.errors`, and how often the functions of the module `torch_npu` were called."""
    compat.install()
    try:
        import torch_npu

        calls = dict.fromkeys(("npu_fusion_attention_v3", "npu_ring_attention_update"), 0)
        for name in calls:
            setattr(torch_npu, name, _counting(calls, name, getattr(torch_npu, name)))
        return contract_jobs.errors(group, **call), calls
    finally:
        compat.uninstall()


def _counting(calls: dict[str, int], name: str, function: object) -> object:
    def counted(*args: object, **kwargs: object) -> object:
        calls[name] += 1
        return function(*args, **kwargs)

    return counted


def hccl(group: dist.ProcessGroup) -> list[float]:
    """A group of the backend "hccl" (all processes of the pool take part), used by a collective and by attention."""
    rank, world = place_of(group)
    compat.install()
    try:
        made = dist.new_group(dist.get_process_group_ranks(group), backend="hccl")
        total = torch.ones(1, device="npu")
        dist.all_reduce(total, group=made)
        q = torch.randn(1, 2, 4 * world, 8, generator=torch.Generator().manual_seed(0))
        smap = rs.ShardMap.contiguous(4 * world, world)
        out = rs.attention(*[smap.shard(q, rank, 2)] * 3, mask=rs.causal(), group=made)
        right = smap.shard(rs.attention(q, q, q, mask=rs.causal()), rank, 2)
        dist.destroy_process_group(made)
        return [float(total), float((out - right).abs().max())]
    finally:
        compat.uninstall()

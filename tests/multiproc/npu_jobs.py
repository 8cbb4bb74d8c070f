"""Jobs of the pool with the stand-in for torch_npu installed."""

from __future__ import annotations

import npu_cp_jobs
import sdpa_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ringspan.compat import torch_npu as compat
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as pytorch
from torch.distributed.tensor.experimental._context_parallel import set_rotate_method
from user_jobs import place_of

import ringspan as rs


def errors(group: dist.ProcessGroup, **call: object) -> tuple[dict, dict[str, int]]:
    """`npu_cp_jobs.errors`, and how often the functions of the module `torch_npu` were called."""
    compat.install()
    try:
        import torch_npu

        calls = dict.fromkeys(("npu_fusion_attention_v3", "npu_ring_attention_update"), 0)
        for name in calls:
            setattr(torch_npu, name, _counting(calls, name, getattr(torch_npu, name)))
        return npu_cp_jobs.errors(group, **call), calls
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
        right = smap.shard(rs.attention(q, q, q, mask=rs.causal(), group=rs.LOCAL), rank, 2)
        dist.destroy_process_group(made)
        return [float(total), float((out - right).abs().max())]
    finally:
        compat.uninstall()


def step(group: dist.ProcessGroup, setting: sdpa_jobs.Setting) -> tuple[dict, int]:
    """`sdpa_jobs.step` where PyTorch's own context parallelism switches us on, and the calls of the ring update."""
    compat.install()
    try:
        import torch_npu

        calls = {"npu_ring_attention_update": 0}
        torch_npu.npu_ring_attention_update = _counting(
            calls, "npu_ring_attention_update", torch_npu.npu_ring_attention_update
        )
        return sdpa_jobs.step(group, setting, enable=False), calls["npu_ring_attention_update"]
    finally:
        compat.uninstall()


def counted_collectives(group: dist.ProcessGroup) -> list[dict[str, int]]:
    """What CommDebugMode counts inside PyTorch's context: forward only, and with backward."""
    compat.install()
    try:
        world = group.size()
        mesh = DeviceMesh.from_group(group, "cpu")
        set_rotate_method("alltoall")
        found = []
        for backward in (False, True):
            tensors = [torch.randn(2, 4, 16 * world, 8) for _ in range(3)]
            with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2, 2, 2]):
                leaves = [x.requires_grad_(backward) for x in tensors]
                with CommDebugMode() as mode:
                    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
                    if backward:
                        out.sum().backward()
                for x in tensors:
                    x.requires_grad_(False)
            found.append({str(op): count for op, count in mode.get_comm_counts().items() if count})
        return found
    finally:
        set_rotate_method("allgather")
        compat.uninstall()


def utilities(group: dist.ProcessGroup) -> list[str]:
    """The sharding utilities by torch_npu's names: which are wrong."""
    rank, world = place_of(group)
    wrong = []
    compat.install()
    try:
        from torch_npu.distributed.tensor.experimental._context_parallel import (
            _CausalBehavior,
            _context_parallel_shard,
            _cp_options,
            _HeadTailLoadBalancer,
            _is_causal_behavior,
            _PerDocumentHeadTailLoadBalancer,
            context_parallel_unshard,
        )

        mesh, length = DeviceMesh.from_group(group, "cpu"), 8 * world
        whole = torch.arange(2 * length).view(2, length)
        documents = [[length // 2, length // 2], [length // 4, length // 4, length // 2]]
        head_tail = _HeadTailLoadBalancer(length, world, "cpu")
        for balancer in (None, head_tail, _PerDocumentHeadTailLoadBalancer(documents, world, "cpu")):
            (part,) = _context_parallel_shard(mesh, [whole.clone()], [1], load_balancer=balancer)
            (back,) = context_parallel_unshard(mesh, [part], [1], load_balancer=balancer)
            if balancer is not None and not torch.equal(back, whole):
                wrong.append(f"round trip of {type(balancer).__name__}")
            if balancer is head_tail and not torch.equal(part[0], rs.ShardMap.head_tail(length, world).positions(rank)):
                wrong.append("head-tail positions")
        for balanced in (False, True):
            _cp_options.enable_load_balance = balanced
            for step in range(world):
                later = step > rank
                wanted = _CausalBehavior.IS_CAUSAL if step == 0 else (
                    _CausalBehavior.SKIP if later and not balanced else _CausalBehavior.NOT_IS_CAUSAL
                )  # fmt: skip
                if _is_causal_behavior(rank, world, step, True) is not wanted:
                    wrong.append(f"step {step} of rank {rank}, balanced {balanced}")
                if _is_causal_behavior(rank, world, step, False) is not _CausalBehavior.NOT_IS_CAUSAL:
                    wrong.append(f"full, step {step} of rank {rank}")
    finally:
        _cp_options.enable_load_balance = True
        pytorch._dispatch_mode = pytorch._DispatchMode.MONKEY_PATCH
        compat.uninstall()
    return wrong

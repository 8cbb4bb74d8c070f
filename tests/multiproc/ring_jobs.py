"""Jobs of the pool about how the ring runs: collectives, bits, strides, memory, gradients across ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import torch
import torch.distributed as dist
from cases import Case, run_case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from user_jobs import place_of

import ringspan as rs


def shards_of(smap: rs.ShardMap, rank: int, seed: int = 0, dtype: torch.dtype = torch.float32, dim: int = 8) -> list:
    """q, k, v (leaves) and dout of this rank: 4 query heads, 2 KV heads."""
    drawn = (torch.from_numpy(x).to(dtype) for x in oracle.draw(seed, smap.seq_len, 4, 2, dim))
    local = [smap.shard(x, rank, 2) for x in drawn]
    return [*(x.requires_grad_() for x in local[:3]), local[3]]


def collectives(
    group: dist.ProcessGroup, exchange: str, inference: bool, schedule: str = "auto"
) -> dict[str, dict[str, int]]:
    """What CommDebugMode counts in forward alone and in forward with backward."""
    rank, world = place_of(group)
    smap = rs.ShardMap.head_tail(16, world)
    *leaves, dout = shards_of(smap, rank)
    how = {"exchange": exchange, "schedule": schedule}
    found = {}
    with CommDebugMode() as mode, torch.inference_mode(inference):
        out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group, **how)
        found["forward"] = _counts(mode)
    if not inference:
        with CommDebugMode() as mode:
            out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group, **how)
            out.backward(dout)
        found["both"] = _counts(mode)
    return found


def compiled_schedule(group: dist.ProcessGroup, schedule: str) -> float:
    """Largest difference between a plain call and the same under torch.compile and under activation checkpointing."""
    rank, world = place_of(group)
    smap = rs.ShardMap.head_tail(22, world)
    *leaves, dout = shards_of(smap, rank)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rs.attention(q, k, v, mask=rs.causal(), shard_map=smap, group=group, schedule=schedule)

    torch._dynamo.reset()  # of this code, eight graphs at most are kept
    ways = [call, torch.compile(call, backend="aot_eager", fullgraph=True)]
    ways.append(lambda q, k, v: checkpoint(call, q, k, v, use_reentrant=False))
    results = []
    for way in ways:
        out = way(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    pairs = [pair for other in results[1:] for pair in zip(results[0], other, strict=True)]
    return max(float((one - two).abs().max()) for one, two in pairs)


def refused_schedule(group: dist.ProcessGroup, schedule: str, exchange: str) -> tuple[str, str]:
    """Kind and message of the error of a call."""
    rank, world = place_of(group)
    smap = rs.ShardMap.contiguous(8, world)
    *leaves, _ = shards_of(smap, rank)
    try:
        rs.attention(*leaves, shard_map=smap, group=group, schedule=schedule, exchange=exchange)
    except (ValueError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    return "", ""


def _counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).split(".")[-1]: count for op, count in mode.get_comm_counts().items() if count}


def counted_results_are_right(group: dist.ProcessGroup) -> bool:
    """Under CommDebugMode the results have the bits of an ordinary call."""
    rank, world = place_of(group)
    smap = rs.ShardMap.head_tail(16, world)
    *leaves, dout = shards_of(smap, rank)
    results = []
    for counted in (False, True):
        with CommDebugMode() if counted else torch.enable_grad():
            out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group)
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
    return all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def other_strides_on_each_rank(group: dist.ProcessGroup, exchange: str) -> bool:
    """Case A17: one rank permuted, one sliced, others contiguous; dout expanded. Same bits as all contiguous."""
    rank, world = place_of(group)
    smap = rs.ShardMap.contiguous(24, world)
    *plain, _ = shards_of(smap, rank, 17)
    views = [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
        lambda x: torch.stack([x, x], -3).select(-3, 1),
        lambda x: x,
    ]
    results = []
    for view in (lambda x: x, views[rank]):
        leaves = [view(x.detach()).requires_grad_() for x in plain]
        out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group, exchange=exchange)
        scalar = out.sum() if view is views[rank] else (out * torch.ones_like(out)).sum()
        results.append([out, *torch.autograd.grad(scalar, leaves)])
    return all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def results_by_position(group: dist.ProcessGroup, case: Case) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each result of this rank in full precision, without padding rows, and the positions of its rows."""
    local = run_case(case, group, *place_of(group))
    results = {"out": local.out, "lse": local.stats.lse, "dq": local.dq, "dk": local.dk, "dv": local.dv}
    found = {}
    for name, rows in results.items():
        positions = local.kv_positions if name in ("dk", "dv") else local.q_positions
        held = positions >= 0
        found[name] = rows.detach().double().numpy()[:, :, held], positions[held]
    return found


def repeats(group: dist.ProcessGroup, dtype: str, split: str, exchange: str, times: int) -> bool:
    """Case A25: documents over ranks, random pauses before every call, equal bits every time."""
    rank, world = place_of(group)
    smap = getattr(rs.ShardMap, split)(96, world)
    *leaves, dout = shards_of(smap, rank, 25, getattr(torch, dtype), 16)
    mask = rs.documents(lengths=[30, 7, 59])
    # To the end also where bits differ: the other ranks wait for this one.
    first, same, pauses = None, True, random.Random(rank)
    for _ in range(times):
        time.sleep(pauses.random() * 0.004)
        out, stats = rs.attention(*leaves, mask=mask, shard_map=smap, group=group, exchange=exchange, return_stats=True)
        time.sleep(pauses.random() * 0.004)
        found = [out, stats.lse, *torch.autograd.grad(out, leaves, dout)]
        first = first or found
        same &= all(torch.equal(one, two) for one, two in zip(first, found, strict=True))
    return same


def skipped_hops(group: dist.ProcessGroup, exchange: str) -> float:
    """Documents that end where shards end: no rank needs another's keys, and every rank still takes part."""
    rank, world = place_of(group)
    smap = rs.ShardMap.contiguous(8 * world, world)
    *leaves, dout = shards_of(smap, rank, 3)
    mask = rs.documents(lengths=[8] * world)
    out = rs.attention(*leaves, mask=mask, shard_map=smap, group=group, exchange=exchange)
    alone = rs.attention(*leaves, mask=rs.causal(), group=rs.LOCAL)
    pairs = zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(alone, leaves, dout), strict=True)
    return max(float((one - two).abs().max()) for one, two in [*pairs, (out, alone)])


def checkpointed(group: dist.ProcessGroup, reentrant: bool) -> bool:
    """Activation checkpointing recomputes the ring and gives the same bits."""
    rank, world = place_of(group)
    smap = rs.ShardMap.striped(17, world)
    *leaves, dout = shards_of(smap, rank)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return rs.attention(q.sin(), k, v, mask=rs.causal(), shard_map=smap, group=group).cos()

    plain = torch.autograd.grad(block(*leaves), leaves, dout)
    checkpoint(block, *leaves, use_reentrant=reentrant).backward(dout)
    return all(torch.equal(leaf.grad, right) for leaf, right in zip(leaves, plain, strict=True))


def assumed(group: dist.ProcessGroup, exchange: str) -> bool:
    """Without the agreement, calls have the bits of ordinary ones, and ordinary ones go on working."""
    rank, world = place_of(group)
    smap = rs.ShardMap.striped(17, world)
    *leaves, dout = shards_of(smap, rank)
    results = []
    for assume in (False, True, False):
        out = rs.attention(
            *leaves, mask=rs.causal(), shard_map=smap, group=group, exchange=exchange, assume_agreed=assume
        )
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    return all(torch.equal(one, two) for found in results[1:] for one, two in zip(results[0], found, strict=True))


def groups_and_meshes(group: dist.ProcessGroup, fresh: dist.ProcessGroup) -> bool:
    """A DeviceMesh, and a group whose ranks stand in another order than the processes, give the group's result."""
    world = dist.get_world_size(group)
    right, same = [], True
    mesh = DeviceMesh.from_group(group, "cpu")
    for name, used in (("group", group), ("mesh", mesh), ("turned", fresh)):
        place = dist.get_rank(used) if name != "mesh" else mesh.get_local_rank()
        smap = rs.ShardMap.head_tail(13, world)
        *leaves, dout = shards_of(smap, place)
        out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=used)
        whole = smap.unshard(out, group=used, dim=2, grad="sum")
        grads = torch.autograd.grad(whole, leaves, smap_rows(dout, smap, place))
        found = [whole.detach(), *(smap.unshard(grad, group=used, dim=2) for grad in grads)]
        right = right or found
        same &= all(torch.allclose(one, two, atol=1e-6) for one, two in zip(found, right, strict=True))
    return same


def smap_rows(dout: torch.Tensor, smap: rs.ShardMap, rank: int) -> torch.Tensor:
    """A gradient of the whole sequence that is `dout` in this rank's rows and 0 elsewhere."""
    whole = dout.new_zeros(*dout.shape[:2], smap.seq_len, dout.shape[3])
    whole[:, :, smap.positions(rank)] = dout
    return whole


def unshard_gradients(group: dist.ProcessGroup) -> list[bool]:
    """grad="sum" adds the ranks' gradients up, grad="slice" takes this rank's rows of its own."""
    rank, world = place_of(group)
    found = []
    for split in ("contiguous", "head_tail", "striped"):
        smap = getattr(rs.ShardMap, split)(11, world)
        x = smap.shard(torch.arange(22.0).reshape(2, 11), rank, 1).requires_grad_()
        weights = [torch.arange(22.0).reshape(2, 11) * (1 + other) for other in range(world)]
        (smap.unshard(x, group=group, dim=1, grad="sum") * weights[rank]).sum().backward()
        found.append(torch.equal(x.grad, smap.shard(sum(weights), rank, 1)))
        x.grad = None
        (smap.unshard(x, group=group, dim=1, grad="slice") * weights[0]).sum().backward()
        found.append(torch.equal(x.grad, smap.shard(weights[0], rank, 1)))
    return found


def mean_loss(group: dist.ProcessGroup, valid: list[list[bool]], averaged_by: int) -> tuple[float, float, Any]:
    """masked_mean_loss of token losses 4 on rank 0 and 1 elsewhere: the loss, what is displayed, and the gradient."""
    rank, _ = place_of(group)
    losses = torch.full((len(valid[rank]),), 4.0 if rank == 0 else 1.0, requires_grad=True)
    mask = torch.tensor(valid[rank], dtype=torch.bool)
    tokens = losses.masked_fill(~mask, float("nan"))
    loss, displayed = rs.masked_mean_loss(tokens, mask, group=group, averaged_by=averaged_by)
    loss.backward()
    assert not displayed.requires_grad
    return float(loss), float(displayed), losses.grad.tolist()


def peak_of(call: Callable[[], Any]) -> int:
    """Most bytes of PyTorch's CPU allocator that live at once in a call, beyond what lives before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        kept = call()
    live = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return peak


def peak_bytes(group: dist.ProcessGroup, exchange: str, rows: int, backward: bool) -> dict[str, int]:
    """Most bytes of PyTorch's CPU allocator that live at once in a call, beyond its inputs. Causal, contiguous."""
    rank, world = place_of(group)
    smap = rs.ShardMap.contiguous(rows * world, world)
    generator = torch.Generator().manual_seed(rank)
    leaves = [torch.randn(1, heads, rows, 64, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    dout = torch.randn(1, 4, rows, 64, generator=generator)

    def call() -> torch.Tensor:
        return rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group, exchange=exchange)

    call().backward(dout)
    for leaf in leaves:
        leaf.grad = None
    out = call() if backward else None
    peak = peak_of(lambda: out.backward(dout) if backward else call())
    return {"peak": peak, "kv": 2 * 2 * rows * 64 * 4, "out": 4 * rows * 64 * 4}


def seen_by_each_rank(group: dist.ProcessGroup) -> list[float]:
    """With equal scores the output is the mean of all values: each rank holds its number, all see the mean."""
    rank, world = place_of(group)
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)
    v = torch.full((1, 1, 4, 8), float(rank))
    out = rs.attention(q, k, v, group=group)
    assert np.isclose(out.numpy(), (world - 1) / 2).all()
    return out.flatten().tolist()

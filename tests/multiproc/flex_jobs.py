"""Jobs of the pool about ringspan.flex: each rank's rows against FlexAttention's definition of the whole sequences."""

from __future__ import annotations

import functools
from typing import Any

import flex_cases
import torch
import torch.distributed as dist
from cases import map_of
from flex_cases import BATCH, HEADS, MASKS, SEQ
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from user_jobs import place_of

import ringspan as rs
from ringspan import flex

Results = tuple[torch.Tensor, ...]  # out, lse, dq, dk, dv, and the gradients of captured tensors


@functools.lru_cache(maxsize=16)
def _expected(mask: str, mod: str) -> Results:
    """Of the whole sequences."""
    q, k, v, dout = flex_cases.inputs()
    score_mod, tables = flex_cases.score_mod(mod)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *tables]
    keep = flex_cases.kept_pairs(MASKS[mask], BATCH, HEADS, SEQ, SEQ)
    out, lse = flex_cases.attend(*leaves[:3], keep, score_mod)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def _map(split: tuple, world: int) -> rs.ShardMap:
    if split == ("uneven",):
        return rs.ShardMap.from_lengths({2: [4, 9], 4: [5, 0, 7, 1]}[world])
    if split == ("by batch",):
        order = torch.arange(SEQ)
        lists = [
            [[(row, int(at), 1, 1) for row, at in enumerate(part)] for part in positions.tensor_split(world)]
            for positions in (order, order.flip(0))
        ]
        return rs.ShardMap.from_segments(lists, seq_len=SEQ)
    return map_of(split, SEQ, world)


def errors(
    group: dist.ProcessGroup, split: tuple, pairs: list[tuple[str, str]], exchange: str, schedule: Any = "auto"
) -> dict[str, float]:
    """The largest difference of any result of this rank, for each mask and score_mod; inf where infinities differ."""
    rank, world = place_of(group)
    smap = _map(split, world)
    q, k, v, dout = (smap.shard(x, rank, 2) for x in flex_cases.inputs())
    worst = {}
    for mask, mod in pairs:
        right = _expected(mask, mod)
        score_mod, tables = flex_cases.score_mod(mod)
        leaves = [*(x.clone().requires_grad_() for x in (q, k, v)), *tables]
        blocks = create_block_mask(MASKS[mask], BATCH, HEADS, SEQ, SEQ, device="cpu", BLOCK_SIZE=4)
        out, aux = flex.flex_attention(
            *leaves[:3],
            score_mod,
            blocks,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
            shard_map=smap,
            group=group,
            exchange=exchange,
            schedule=schedule,
        )
        grads = list(torch.autograd.grad(out, leaves, dout))
        for grad in grads[3:]:
            dist.all_reduce(grad, group=group)
        rows = [smap.shard(x, rank, 2) for x in (*right[:2], *right[2:5])]
        if smap.num_lists == 1:
            rows[1][:, :, smap.positions(rank) < 0] = -torch.inf
        found = zip((out, aux.lse, *grads), (*rows, *right[5:]), strict=True)
        worst[f"{mask}, {mod}"] = max(_difference(got.detach(), wanted) for got, wanted in found)
    return worst


def _difference(got: torch.Tensor, right: torch.Tensor) -> float:
    finite = right.isfinite()
    if got.shape != right.shape or not torch.equal(got[~finite], right[~finite]):
        return torch.inf
    return float((got - right)[finite].abs().max()) if finite.any() else 0.0


def local_positions(group: dist.ProcessGroup) -> tuple[float, float]:
    """Error of this rank's rows, and the error of the same rows if indices were counted in every shard anew."""
    rank, world = place_of(group)
    smap = rs.ShardMap.contiguous(SEQ, world)
    whole = flex_cases.inputs()[:3]
    everything = torch.ones(SEQ, SEQ, dtype=torch.bool)

    def distance(score: torch.Tensor, b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return score + 1.0 * (kv - q)

    right, _ = flex_cases.attend(*whole, everything, distance)
    counted = torch.tensor([at for place in range(world) for at in range(smap.local_rows(place))])
    wrong, _ = flex_cases.attend(
        *whole, everything, lambda score, b, h, q, kv: distance(score, b, h, counted[q], counted[kv])
    )
    out = flex.flex_attention(
        *(smap.shard(x, rank, 2) for x in whole), distance, enable_gqa=True, shard_map=smap, group=group
    )
    rows = [smap.shard(x, rank, 2) for x in (right, wrong)]
    return float((out - rows[0]).abs().max()), float((rows[1] - rows[0]).abs().max())


def without_a_map(group: dist.ProcessGroup) -> float:
    """Equal contiguous shards need no map, and a mesh serves as a group: the largest error of this rank."""
    rank, world = place_of(group)
    whole = flex_cases.inputs(seq_len=4 * world)[:3]
    mod, _ = flex_cases.score_mod("positions")
    keep = flex_cases.kept_pairs(MASKS["by head"], BATCH, HEADS, 4 * world, 4 * world)
    right, _ = flex_cases.attend(*whole, keep, mod)
    local = [x[:, :, 4 * rank : 4 * rank + 4] for x in whole]
    found = [
        flex.flex_attention(*local, mod, MASKS["by head"], enable_gqa=True, group=one)
        for one in (group, DeviceMesh.from_group(group, "cpu"))
    ]
    return max(float((out - right[:, :, 4 * rank : 4 * rank + 4]).abs().max()) for out in found)


def refusals(group: dist.ProcessGroup) -> list[str]:
    """What this rank is told where the last rank alone passes something that is refused, and a good call after each."""
    rank, world = place_of(group)
    smap = rs.ShardMap.contiguous(SEQ, world)
    local = [smap.shard(x, rank, 2) for x in flex_cases.inputs()[:3]]
    last = rank == world - 1

    def broken(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such document")

    def lower(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return q >= kv + 1

    calls = [
        {"score_mod": (lambda s, b, h, q, kv: torch.relu(s)) if last else None},
        {"block_mask": broken if last else None},
        {"block_mask": create_block_mask(MASKS["causal"], None, None, 6 if last else SEQ, SEQ, device="cpu")},
        {"block_mask": lower if last else MASKS["causal"]},
        {"block_mask": MASKS["by head" if last else "causal"]},
        {"score_mod": (lambda s, b, h, q, kv: s * 2) if last else None},
        {"score_mod": (lambda s, b, h, q, kv: s + q) if last else None},
        {"kernel_options": {"SPEED": 9} if last else None},
    ]
    told = []
    for call in calls:
        try:
            flex.flex_attention(*local, enable_gqa=True, shard_map=smap, group=group, **call)
            told.append("nothing")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        flex.flex_attention(*local, enable_gqa=True, shard_map=smap, group=group)
    return told

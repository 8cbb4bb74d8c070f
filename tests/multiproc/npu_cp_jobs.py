"""Jobs of the pool: the contract's ops in a group (.cp) on shards of a call, against the oracle of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import torch
import torch.distributed as dist
from cases import map_of
from npu_cases import EMPTY, Call, statistics
from user_jobs import place_of

import ringspan as rs

OPS = torch.ops.ringspan


def rows_of(x: np.ndarray, positions: np.ndarray, filler: float = 1000.0) -> torch.Tensor:
    """This rank's rows of [B, N, S, D], padding filled with something large."""
    rows = oracle.take_rows(x, positions)
    rows[:, :, positions < 0] = filler
    return torch.from_numpy(rows)


def local_keywords(call: Call, q_positions: np.ndarray, full_mask: bool) -> dict[str, Any]:
    """The keyword arguments of this rank: pse and full masks lose the rows of others."""
    keywords = call.keywords()

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[..., np.maximum(q_positions, 0), :].contiguous()

    if call.pse is not None and call.pse.shape[2] > 1:
        keywords["pse"] = cut(call.pse.detach()).requires_grad_()
    if full_mask:
        keywords["atten_mask"] = cut(keywords["atten_mask"])
    return keywords


def errors(group: dist.ProcessGroup, call: Call, split: tuple, kv_split: tuple, exchange: str, full_mask: bool) -> dict:
    """The largest relative errors on this rank: forward, statistics, all gradients; the gradient op equals autograd."""
    rank, world = place_of(group)
    q_map, kv_map = map_of(split, call.q_len, world), map_of(kv_split, call.kv_len, world)
    places = [smap.positions(rank).numpy() for smap in (q_map, kv_map, kv_map, q_map)]
    dtype = getattr(torch, call.dtype)
    q, k, v, dout = (
        call.in_layout(rows_of(x, where).to(dtype)).contiguous() for x, where in zip(call.inputs(), places, strict=True)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    keywords = local_keywords(call, places[0], full_mask)
    where = {
        "group_name": group.group_name,
        "q_map": q_map.to_tensor(),
        "kv_map": kv_map.to_tensor(),
        "exchange": exchange,
    }
    results = OPS.fusion_attention_v3.cp(*leaves, call.q_heads, call.layout, **keywords, **where)
    wanted = leaves + [keywords[name] for name in ("pse", "sink") if name in keywords]
    gradients = torch.autograd.grad(results[0], wanted, dout)
    renamed = {{"scale": "scale_value"}.get(name, name): value for name, value in keywords.items()}
    direct = OPS.fusion_attention_grad_v3.cp(
        *(x.detach() for x in leaves), dout, call.q_heads, call.layout, softmax_max=results[1], softmax_sum=results[2],
        attention_in=results[0], seed=results[4], offset=results[5], **renamed, **where,
    )  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(gradients[:3], direct[:3], strict=True))
    return _judge(call, results, gradients, places, group)


def _judge(call: Call, results: Any, gradients: Any, places: list, group: dist.ProcessGroup) -> dict[str, float]:
    if "keep_prob" in call.arguments:
        full = (call.batch, call.q_heads, call.q_len, call.kv_len)
        call.dropped = oracle.dropped_pairs(1 - call.arguments["keep_prob"], int(results[4]), 0, full)
    expected = call.expect()
    q_rows, kv_rows = places[0], places[1]
    found = {"seed": float(results[4])}
    heads = (call.q_heads, call.q_heads, call.kv_heads, call.kv_heads)
    rights = (expected.out, expected.dq, expected.dk, expected.dv)
    floors = (0.0, expected.dq_terms / 4, expected.dk_terms / 4, 0.0)
    for name, x, count, right, floor in zip(
        ("out", "dq", "dk", "dv"), (results[0], *gradients[:3]), heads, rights, floors, strict=True
    ):
        where = kv_rows if name in ("dk", "dv") else q_rows
        got = call.out_of_layout(x, count)
        found[name] = oracle.error(got, oracle.take_rows(right, where), right, floor)
    for name, x, right in zip(("max", "sum"), results[1:3], statistics(expected, call), strict=True):
        rows = oracle.take_rows(right, q_rows)
        rows[:, :, q_rows < 0] = -EMPTY if name == "max" else EMPTY
        own = x.detach()[..., 0] if call.layout != "TND" else x.detach()[..., 0].transpose(0, 1)[None]
        found[name] = oracle.error(own.double().numpy(), rows)
    extra = list(gradients[3:])
    if call.pse is not None:
        dpse = extra.pop(0)
        right = call.scale * expected.dbias
        if call.pse.shape[0] == 1:
            right = right.sum(0, keepdims=True)
        if call.pse.shape[2] > 1:
            found["dpse"] = oracle.error(dpse.double().numpy(), oracle.take_rows(right, q_rows), right, floors[1])
        else:
            dist.all_reduce(dpse, group=group)
            found["dpse"] = oracle.error(dpse.double().numpy(), right.sum(2, keepdims=True), None, floors[1])
    if call.sink is not None:
        dsink = extra.pop(0)
        dist.all_reduce(dsink, group=group)
        found["dsink"] = oracle.error(dsink.double().numpy(), expected.dsink, None, expected.dsink_terms / 4)
    return found


def refusals(group: dist.ProcessGroup) -> list[str]:
    """What a group is told that the single op would not be."""
    rank, world = place_of(group)
    q = torch.zeros(4, 2, 8)
    ends = torch.tensor([4 * world])
    calls = [
        # Documents cross ranks: their memory order would.
        lambda: OPS.fusion_attention_v3.cp(
            q, q, q, 2, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends, group_name=group.group_name
        ),
        # One rank is wrong, all are told.
        lambda: OPS.fusion_attention_v3.cp(
            q[None], q[None], q[None], 2, "BSND", scale=float("nan") if rank == world - 1 else 1.0,
            group_name=group.group_name,
        ),
        lambda: OPS.fusion_attention_v3.cp(
            q[None], q[None], q[None], 2, "BSND", scale=0.5 + rank, group_name=group.group_name
        ),
        lambda: OPS.fusion_attention_v3.cp(
            q[None], q[None], q[None], 2, "BSND", group_name=group.group_name,
            q_map=rs.ShardMap.contiguous(4 * world + 1, world).to_tensor(),
            kv_map=rs.ShardMap.contiguous(4 * world, world).to_tensor(),
        ),
    ]  # fmt: skip
    told = []
    for call in calls:
        try:
            call()
            told.append("no error")
        except RuntimeError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told

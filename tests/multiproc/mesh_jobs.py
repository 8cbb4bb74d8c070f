"""Jobs of the pool about groups that are parts of a larger world."""

from __future__ import annotations

import datetime

import numpy as np
import oracle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringspan as rs

TIMEOUT = datetime.timedelta(seconds=40)
HEADS, SEQ_LEN, DIM = 4, 22, 8


def _error_of(group: dist.ProcessGroup, mesh: rs.RankMesh, cp_place: int, cp_size: int) -> float:
    """Largest error of out and gradients against the dense oracle: heads by tp, tokens by the place in the group."""
    q, k, v, dout = oracle.draw(5, SEQ_LEN, HEADS, HEADS, DIM)
    expected = oracle.attend(q, k, v, oracle.keep_of(("causal",), SEQ_LEN, SEQ_LEN), dout)
    want = [expected.out, expected.dq, expected.dk, expected.dv]
    tp = mesh.coordinates(dist.get_rank())["tp"]
    heads = slice(tp * HEADS // mesh.tp, (tp + 1) * HEADS // mesh.tp)
    smap = rs.ShardMap.head_tail(SEQ_LEN, cp_size)
    cut = [smap.shard(torch.from_numpy(x[:, heads]), cp_place, 2) for x in (q, k, v, dout)]
    leaves = [x.requires_grad_() for x in cut[:3]]
    out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group)
    found = [out.detach(), *torch.autograd.grad(out, leaves, cut[3])]
    positions = smap.positions(cp_place).numpy()
    return max(
        float(np.abs(one.numpy() - whole[:, heads][:, :, positions]).max())
        for one, whole in zip(found, want, strict=True)
    )


def tp_by_cp(_: dist.ProcessGroup) -> dict[str, float]:
    """Four ranks as tp 2 x cp 2, groups by init_groups and by PyTorch's own mesh."""
    mesh = rs.rank_mesh(4, tp=2, cp=2)
    groups = rs.init_groups(mesh, timeout=TIMEOUT)
    for kind, group in groups.items():
        mesh.check(kind, group)
    place = mesh.coordinates(dist.get_rank())["cp"]
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    mesh.check("cp", device_mesh["cp"])
    mesh.check("tp", device_mesh["tp"])
    return {
        "init_groups": _error_of(groups["cp"], mesh, place, 2),
        "device_mesh": _error_of(device_mesh["cp"], mesh, place, 2),
        "sequence": _error_of(groups["sequence"], mesh, place, 2),
    }


def wrong_groups(_: dist.ProcessGroup) -> dict[str, str]:
    """What `check` says of groups that a user made by hand: the tp pairs, and the cp pairs reversed."""
    mesh, rank, said = rs.rank_mesh(4, tp=2, cp=2), dist.get_rank(), {}
    for name, lists in {"tp_pairs": ([0, 1], [2, 3]), "reversed": ([2, 0], [3, 1]), "right": ([0, 2], [1, 3])}.items():
        made = {tuple(ranks): dist.new_group(ranks, timeout=TIMEOUT, sort_ranks=False) for ranks in lists}
        group = next(group for ranks, group in made.items() if rank in ranks)
        try:
            mesh.check("cp", group)
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    return said


def reversed_group_by_place(_: dist.ProcessGroup) -> float:
    """In a group whose ranks stand in another order, the place in the group says who holds which tokens."""
    mesh, rank = rs.rank_mesh(4, tp=2, cp=2), dist.get_rank()
    groups = {tuple(ranks): dist.new_group(ranks, timeout=TIMEOUT, sort_ranks=False) for ranks in ([2, 0], [3, 1])}
    ranks, group = next((ranks, group) for ranks, group in groups.items() if rank in ranks)
    return _error_of(group, mesh, ranks.index(rank), 2)


def other_world(_: dist.ProcessGroup) -> str:
    """What init_groups says of a mesh of another size."""
    try:
        rs.init_groups(rs.rank_mesh(8, cp=8))
    except ValueError as error:
        return str(error)
    return ""

"""Jobs of the pool on DTensors: attention and the contract's ops on meshes, against the oracle of the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import oracle
import torch
import torch._inductor.config
import torch.distributed as dist
from compile_jobs import Counter, distance
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import ringspan as rs

OPS = torch.ops.ringspan
MAPS = {"contiguous": rs.ShardMap.contiguous, "head_tail": rs.ShardMap.head_tail, "striped": rs.ShardMap.striped}


@dataclass(frozen=True)
class OnMesh:
    """One call. `roles`: what each mesh axis shares out of query (R, B, N, S); `kv_roles`: of key and value."""

    shape: tuple[int, ...]
    roles: str
    kv_roles: str | None = None
    layout: str = "BNSD"
    split: str = "contiguous"
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    q_len: int = 12
    kv_len: int = 12
    v_dim: int = 8
    causal: bool = True
    dtype: str = "float64"


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """All four ranks in this shape, or the first ranks in a row."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{i}" for i in range(len(shape))))


def mesh_for(group: dist.ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh over the job's ranks."""
    if len(shape) == 1:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("axis0",))
    return mesh_of(shape)


def to_layout(x: np.ndarray, layout: str, dtype: str) -> torch.Tensor:
    """[B, N, S, D] in a layout."""
    return cases.to_layout(torch.from_numpy(x).to(getattr(torch, dtype)), layout)


def from_layout(x: torch.Tensor, layout: str, heads: int) -> np.ndarray:
    """The way back, float64."""
    return cases.from_layout(x.detach().double(), layout, heads).numpy()


def placements(roles: str, layout: str) -> list:
    """Placements of query, key and value."""
    heads = layout.index("N") if "N" in layout else 2
    where = {"R": Replicate(), "N": Shard(heads), "S": Shard(layout.index("T" if layout == "TND" else "S"))}
    if "B" in layout:
        where["B"] = Shard(layout.index("B"))
    return [where[letter] for letter in roles]


def order_of(split: str, length: int, roles: str, shape: tuple[int, ...]) -> np.ndarray:
    """Positions of the rows of the whole DTensor."""
    world = shape[roles.index("S")] if "S" in roles else 1
    smap = MAPS[split](length, world)
    return np.concatenate([smap.positions(rank).numpy() for rank in range(world)])


def distributed(x: torch.Tensor, mesh: DeviceMesh, where: list) -> DTensor:
    """Every rank has the whole already. A leaf."""
    return distribute_tensor(x, mesh, where, src_data_rank=None).detach().requires_grad_()


def expected(case: OnMesh, keep: np.ndarray, **changes: Any) -> tuple[list, oracle.Result]:
    """Inputs, and what the oracle makes of them."""
    q, _, _, _ = oracle.draw(3, case.q_len, case.q_heads, case.kv_heads, (8, case.v_dim), case.batch)
    _, k, v, _ = oracle.draw(4, case.kv_len, case.q_heads, case.kv_heads, (8, case.v_dim), case.batch)
    dout = oracle.draw(5, case.q_len, case.q_heads, case.kv_heads, (8, case.v_dim), case.batch)[3]
    return [q, k, v, dout], oracle.attend(q, k, v, keep, dout, **changes)


def keep_of(case: OnMesh) -> np.ndarray:
    """[1, Sq, Skv]"""
    i, j = np.arange(case.q_len)[:, None], np.arange(case.kv_len)[None]
    return (j <= i if case.causal else j < case.kv_len)[None] & np.ones((1, case.q_len, 1), bool)


def relative(found: np.ndarray, right: np.ndarray, floor: float = 1e-30) -> float:
    """Largest difference over the largest value, or over the terms that cancelled in it."""
    return float(np.abs(found - right).max() / max(np.abs(right).max(), floor))


def run_case(
    group: dist.ProcessGroup, case: OnMesh, call: Callable[..., tuple], keep: np.ndarray, **changes: Any
) -> dict:
    """Errors of out, statistics and gradients; where out lies. `call(case, leaves)` gives (out, lse or None)."""
    mesh = mesh_for(group, case.shape)
    inputs, right = expected(case, keep, **changes)
    orders = [
        order_of(case.split, n, case.roles, case.shape) for n in (case.q_len, case.kv_len, case.kv_len, case.q_len)
    ]
    wheres = [placements(roles, case.layout) for roles in (case.roles, *[case.kv_roles or case.roles] * 2)]
    q, k, v, dout = (
        to_layout(x[:, :, order], case.layout, case.dtype) for x, order in zip(inputs, orders, strict=True)
    )
    leaves = [distributed(x, mesh, where) for x, where in zip((q, k, v), wheres, strict=True)]
    out, lse = call(case, leaves)
    gradients = torch.autograd.grad(out, leaves, distribute_tensor(dout, mesh, out.placements, src_data_rank=None))
    found = {}
    heads = (case.q_heads, case.q_heads, case.kv_heads, case.kv_heads)
    names = ("out", "dq", "dk", "dv")
    for name, x, count, order, wanted in zip(
        names, (out, *gradients), heads, (orders[0], orders[0], orders[1], orders[1]),
        (right.out, right.dq, right.dk, right.dv), strict=True,
    ):  # fmt: skip
        assert isinstance(x, DTensor), name
        assert x.shape == (out if name == "out" else leaves[names.index(name) - 1]).shape
        floor = {"dq": right.dq_terms / 4, "dk": right.dk_terms / 4}.get(name, 1e-30)
        found[name] = relative(from_layout(x.full_tensor(), case.layout, count), wanted[:, :, order], floor)
    if lse is not None:
        whole = lse.full_tensor().detach().double().numpy()
        whole = whole.T[None] if case.layout == "TND" else whole
        found["lse"] = relative(whole, right.lse[:, :, orders[0]])
    return {"errors": found, "placements": str(out.placements)}


def attention(group: dist.ProcessGroup, case: OnMesh) -> dict:
    """rs.attention."""

    def call(case: OnMesh, leaves: list) -> tuple:
        heads = case.q_heads if case.layout in ("BSH", "SBH") else None
        mask = rs.causal(align="top_left") if case.causal else rs.full()
        out, stats = rs.attention(*leaves, mask=mask, layout=case.layout, num_heads=heads, return_stats=True)
        return out, stats.lse

    return _enabled(case.split, lambda: run_case(group, case, call, keep_of(case)))


def contract(group: dist.ProcessGroup, case: OnMesh) -> dict:
    """fusion_attention_v3, causal by mode 2, no scale given; and the gradient op by hand."""

    def call(case: OnMesh, leaves: list) -> tuple:
        mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        keywords = {"atten_mask": mask, "sparse_mode": 2} if case.causal else {}
        out, row_max, row_sum, empty, seed, offset = OPS.fusion_attention_v3(
            *leaves, case.q_heads, case.layout, **keywords
        )
        assert all(isinstance(x, DTensor) for x in (out, row_max, row_sum, empty, seed, offset))
        return out, (row_max + row_sum.log())[..., 0]

    return _enabled(case.split, lambda: run_case(group, case, call, keep_of(case), scale=1.0), always=True)


def _enabled(split: str, run: Callable[[], dict], always: bool = False) -> dict:
    if split == "contiguous" and not always:
        return run()
    rs.enable_cp_dtensor_dispatcher(shard_map=MAPS[split])
    try:
        return run()
    finally:
        rs.disable_cp_dtensor_dispatcher()


def operands(group: dist.ProcessGroup, shape: tuple[int, ...], roles: str) -> dict[str, float]:
    """Sink, bias of all shapes, bool mask, per-entry documents, softcap and dropout, with their gradients."""
    case = OnMesh(shape, roles, causal=False, batch=4, q_len=8, kv_len=8)
    mesh = mesh_for(group, shape)
    source = np.random.default_rng(7)
    sink, bias = source.standard_normal(4), source.standard_normal((4, 1, 8, 8))
    shared, hidden = source.standard_normal((4, 1, 8)), source.random((1, 4, 8, 8)) < 0.2
    ids = np.array([[1] * 8, [1] * 3 + [2] * 5, [0] * 2 + [1] * 6, [2] * 7 + [0]])
    keep = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0)
    dropped = oracle.dropped_pairs(0.25, 99, 0, (4, 4, 8, 8))
    everything = bias + shared[None] + np.where(hidden, -np.inf, 0.0)
    inputs, right = expected(
        case, keep, sink=sink, bias=everything, softcap=3.0, dropped=dropped, dropout_p=0.25,
    )  # fmt: skip
    where = placements(roles, "BNSD")
    q, k, v, dout = (torch.from_numpy(x) for x in inputs)
    leaves = [distributed(x, mesh, where) for x in (q, k, v)]
    extra = [distributed(torch.from_numpy(x), mesh, [Replicate()] * mesh.ndim) for x in (sink, bias, shared)]
    mask = distribute_tensor(torch.from_numpy(~hidden), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    documents = rs.documents(ids=torch.from_numpy(ids), inside=rs.full())
    out = rs.attention(
        *leaves, mask=documents, sink=extra[0], bias=extra[1] + extra[2], attn_mask=mask,
        softcap=3.0, dropout_p=0.25, seed=99,
    )  # fmt: skip
    gradients = torch.autograd.grad(
        out, [*leaves, *extra], distribute_tensor(dout, mesh, out.placements, src_data_rank=None)
    )
    whole = [x.full_tensor().detach().numpy() for x in (out, *gradients)]
    dbias = right.dbias
    rights = [
        right.out,
        right.dq,
        right.dk,
        right.dv,
        right.dsink,
        dbias.sum(1, keepdims=True),
        dbias.sum((0, 2))[:, None],
    ]
    names = ("out", "dq", "dk", "dv", "dsink", "dbias", "dshared")
    return {name: relative(x, wanted) for name, x, wanted in zip(names, whole, rights, strict=True)}


def partial_inputs(group: dist.ProcessGroup) -> float:
    """A query that is a sum over ranks, and a key sharded along its head dim, are brought into place."""
    world = group.size()
    mesh = mesh_for(group, (world,))
    case = OnMesh((world,), "S")
    inputs, right = expected(case, keep_of(case))
    q, k, v = (torch.from_numpy(x) for x in inputs[:3])
    part = DTensor.from_local(q / world, mesh, [Partial()], run_check=False)
    hidden = distribute_tensor(k, mesh, [Shard(3)], src_data_rank=None)
    rows = distribute_tensor(v, mesh, [Shard(2)], src_data_rank=None)
    return relative(rs.attention(part, hidden, rows, mask=rs.causal()).full_tensor().numpy(), right.out)


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """What bad calls are told."""
    mesh = mesh_for(group, (group.size(),))
    x = distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)], src_data_rank=None)
    plain = torch.randn(1, 2, 8, 4)
    odd = distribute_tensor(torch.randn(1, 2, 7, 4), mesh, [Shard(2)], src_data_rank=None)
    hidden = distribute_tensor(torch.randn(1, 8, 4), mesh, [Shard(1)], src_data_rank=None)
    calls = {
        "plain": lambda: rs.attention(x, plain, x),
        "group": lambda: rs.attention(x, x, x, group=group),
        "map": lambda: rs.attention(x, x, x, shard_map=rs.ShardMap.contiguous(8, group.size() + 1)),
        "rows": lambda: rs.attention(odd, odd, odd, shard_map=rs.ShardMap.head_tail(7, group.size())),
        "cp": lambda: OPS.fusion_attention_v3.cp(x, x, x, 2, "BNSD", group_name=group.group_name),
        "heads": lambda: OPS.fusion_attention_v3(x, x, x, 3, "BNSD"),
        "sink": lambda: rs.attention(x, x, x, sink="sink"),
        "one head": lambda: rs.attention(hidden, hidden, hidden, layout="BSH", num_heads=1),
        "true heads": lambda: rs.attention(hidden, hidden, hidden, layout="BSH", num_heads=True),
        "disable": rs.disable_cp_dtensor_dispatcher,
        "enable": lambda: rs.enable_cp_dtensor_dispatcher(shard_map=rs.ShardMap.contiguous(8, 2)),
    }
    told = {}
    for name, call in calls.items():
        try:
            call()
            told[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def equal_meshes(group: dist.ProcessGroup) -> dict[str, bool]:
    """On two equal meshes with groups of their own, one after the other: what is on the right one."""
    groups = [dist.new_group(list(range(group.size()))) for _ in range(2)]
    meshes = [DeviceMesh.from_group(one, "cpu", mesh_dim_names=("same",)) for one in groups]
    found = {"equal": meshes[0] == meshes[1] and meshes[0] is not meshes[1]}
    calls = {"attention": rs.attention, "contract": lambda q, k, v: OPS.fusion_attention_v3(q, k, v, 2, "BNSD")[0]}
    for name, call in calls.items():
        for place, mesh in enumerate(meshes):
            # No other op touches these: PyTorch's own cache puts results on the mesh that came first.
            leaves = [
                distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
                for x in torch.randn(3, 1, 2, 2 * group.size(), 4)
            ]
            with torch.no_grad(), rs.count_traffic(groups[place]) as traffic:
                untracked = call(*leaves)
            out = call(*leaves)
            gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
            found[f"{name} {place}"] = all(x.device_mesh is mesh for x in (untracked, out, *gradients))
            found[f"{name} {place} exchanged"] = traffic.sent_bytes > 0
            found[f"{name} {place} history"] = out.requires_grad and not untracked.requires_grad
            found[f"{name} {place} local history"] = not out._local_tensor.requires_grad
    return found


def backward_after_disable(group: dist.ProcessGroup) -> dict[str, float]:
    """Forward under a head-tail map, backward under another or none: the forward's map counts."""
    world = group.size()
    case = OnMesh((world,), "S", split="head_tail", q_len=8 * world, kv_len=8 * world)
    mesh = mesh_for(group, case.shape)
    found = {}
    order = order_of("head_tail", case.q_len, "S", case.shape)
    for name in ("attention", "contract"):
        inputs, right = expected(case, keep_of(case), **({} if name == "attention" else {"scale": 1.0}))
        q, k, v, dout = (torch.from_numpy(np.ascontiguousarray(x[:, :, order])) for x in inputs)
        dtype = torch.float64 if name == "attention" else torch.float32
        leaves = [distributed(x.to(dtype), mesh, [Shard(2)]) for x in (q, k, v)]
        rs.enable_cp_dtensor_dispatcher(shard_map=rs.ShardMap.head_tail)
        try:
            if name == "attention":
                out = rs.attention(*leaves, mask=rs.causal())
            else:
                mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
                out = OPS.fusion_attention_v3(*leaves, 4, "BNSD", atten_mask=mask, sparse_mode=2)[0]
        finally:
            rs.disable_cp_dtensor_dispatcher()
        upstream = distribute_tensor(dout.to(dtype), mesh, [Shard(2)], src_data_rank=None)
        gradients = torch.autograd.grad(out, leaves, upstream)
        for what, x, wanted in zip("qkv", gradients, (right.dq, right.dk, right.dv), strict=True):
            found[f"{name} d{what}"] = relative(x.full_tensor().double().numpy(), wanted[:, :, order])
    return found


def comm_counts(group: dist.ProcessGroup, split: str) -> dict[str, dict[str, int]]:
    """What CommDebugMode counts in a forward and in both passes, for every way to attend on DTensors."""
    world = group.size()
    mesh = mesh_for(group, (world,))
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    calls = {
        "attention": lambda x: rs.attention(x, x, x, mask=rs.causal(), exchange="all_to_all"),
        "contract": lambda x: OPS.fusion_attention_v3(x, x, x, 2, "BNSD", atten_mask=triangle, sparse_mode=2)[0],
        "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    }
    found = {}
    rs.enable_cp_dtensor_dispatcher(shard_map=MAPS[split])
    try:
        for name, call in calls.items():
            x = distributed(torch.randn(1, 2, 4 * world, 4), mesh, [Shard(2)])
            with CommDebugMode() as forward:
                out = call(x)
            with CommDebugMode() as both:
                call(x)
                out.backward(torch.ones_like(out))
            for passes, mode in (("forward", forward), ("both", both)):
                found[f"{name} {passes}"] = {str(op): count for op, count in mode.get_comm_counts().items() if count}
    finally:
        rs.disable_cp_dtensor_dispatcher()
    return found


def compiled(group: dist.ProcessGroup, backend: str, dynamic: bool | None, split: str) -> dict[str, Any]:
    """rs.attention and SDPA on DTensors in one graph, three lengths: distance from eager, and compilations."""
    world = group.size()
    mesh = mesh_for(group, (world,))
    found: dict[str, Any] = {}
    rs.enable_cp_dtensor_dispatcher(shard_map=MAPS[split])
    # PyTorch 2.13 raises KeyError when inductor's graph cache is hit by DTensor.to_local() under dynamic shapes.
    torch._inductor.config.fx_graph_cache = False
    try:
        for name in ("attention", "sdpa"):
            torch._dynamo.reset()
            counter = Counter(backend)

            def step(q: DTensor, k: DTensor, v: DTensor) -> DTensor:
                if name == "attention":  # noqa: B023
                    return rs.attention(q.sin(), k, v, mask=rs.causal(), scale=0.3).cos()
                return torch.nn.functional.scaled_dot_product_attention(q.sin(), k, v, is_causal=True, scale=0.3).cos()

            call = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
            counts, worst = [], 0.0
            for rows in (6, 10, 14):
                source = torch.Generator().manual_seed(rows)
                leaves = [
                    distributed(torch.randn(1, 2, rows * world, 4, generator=source), mesh, [Shard(2)])
                    for _ in range(3)
                ]
                results = []
                for run in (step, call):
                    out = run(*leaves)
                    results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
                worst = max(worst, distance(*[[x.to_local().detach() for x in result] for result in results]))
                counts.append(counter.count)
            found[name] = {"distance": worst, "compilations": counts}
    finally:
        torch._inductor.config.fx_graph_cache = True
        rs.disable_cp_dtensor_dispatcher()
    return found


def compiled_contract(group: dist.ProcessGroup, backend: str) -> dict[str, Any]:
    """fusion_attention_v3 on DTensors in one graph; under another map it is refused, and so after the map changed."""
    world = group.size()
    mesh = mesh_for(group, (world,))
    torch._dynamo.reset()

    def step(q: DTensor, k: DTensor, v: DTensor) -> DTensor:
        return OPS.fusion_attention_v3(q.sin(), k, v, 2, "BNSD", scale=0.3)[0].cos()

    call = torch.compile(step, fullgraph=True, backend=backend)
    source = torch.Generator().manual_seed(1)
    leaves = [distributed(torch.randn(1, 2, 6 * world, 4, generator=source), mesh, [Shard(2)]) for _ in range(3)]
    results = []
    for run in (step, call):
        out = run(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    found = {"distance": distance(*[[x.to_local().detach() for x in result] for result in results])}
    torch._dynamo.reset()
    rs.enable_cp_dtensor_dispatcher(shard_map=rs.ShardMap.head_tail)
    try:
        call(*leaves)
        found["head_tail"] = "nothing"
    except Exception as error:
        found["head_tail"] = str(error)
    finally:
        rs.disable_cp_dtensor_dispatcher()
    return found


def contract_operands(group: dist.ProcessGroup, shape: tuple[int, ...], roles: str) -> dict[str, float]:
    """fusion_attention_v3 with pse, sink, a full mask and dropout: results, and the gradients of all."""
    case = OnMesh(shape, roles, causal=False, batch=4, q_len=8, kv_len=8)
    mesh = mesh_for(group, shape)
    source = np.random.default_rng(11)
    pse, sink = source.standard_normal((1, 4, 8, 8)), source.standard_normal(4)
    masked = source.random((4, 1, 8, 8)) < 0.3
    masked[..., 0] = False
    everywhere = [Replicate()] * mesh.ndim
    rs.enable_cp_dtensor_dispatcher()
    try:
        torch.manual_seed(5)
        inputs, _ = expected(case, keep_of(case), scale=1.0)
        q, k, v, dout = (torch.from_numpy(x).float() for x in inputs)
        leaves = [distributed(x, mesh, placements(roles, "BNSD")) for x in (q, k, v)]
        extra = [distributed(torch.from_numpy(x).float(), mesh, everywhere) for x in (pse, sink)]
        out, _, _, _, seed, offset = OPS.fusion_attention_v3(
            *leaves, 4, "BNSD", pse=extra[0], sink=extra[1], atten_mask=torch.from_numpy(masked), sparse_mode=1,
            keep_prob=0.75, scale=0.5,
        )  # fmt: skip
        gradients = torch.autograd.grad(
            out, [*leaves, *extra], distribute_tensor(dout, mesh, out.placements, src_data_rank=None)
        )
    finally:
        rs.disable_cp_dtensor_dispatcher()
    assert int(offset.full_tensor()) == 0
    dropped = oracle.dropped_pairs(0.25, int(seed.full_tensor()), 0, (4, 4, 8, 8))
    # pse_type 1: added before the scale.
    bias = np.where(masked, -np.inf, 0.5 * pse)
    _, right = expected(case, keep_of(case), scale=0.5, sink=sink, bias=bias, dropped=dropped, dropout_p=0.25)
    whole = [x.full_tensor().detach().double().numpy() for x in (out, *gradients)]
    rights = [right.out, right.dq, right.dk, right.dv, 0.5 * right.dbias.sum(0, keepdims=True), right.dsink]
    names = ("out", "dq", "dk", "dv", "dpse", "dsink")
    return {name: relative(x, wanted) for name, x, wanted in zip(names, whole, rights, strict=True)}


def contract_documents(group: dist.ProcessGroup, roles: str) -> float:
    """TND with documents that cross ranks; versions 1 and 2 give the same as 3."""
    world = group.size()
    case = OnMesh((world,), roles, layout="TND", batch=1, dtype="float32")
    mesh = mesh_for(group, case.shape)
    ends = torch.tensor([5, 5, 12])
    ids = np.array([1] * 5 + [2] * 7)
    keep = (ids[:, None] == ids[None])[None] & keep_of(case)
    inputs, right = expected(case, keep, scale=1.0)
    leaves = [distributed(to_layout(x, "TND", "float32"), mesh, placements(roles, "TND")) for x in inputs[:3]]
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    keywords = {"atten_mask": triangle, "sparse_mode": 3, "softmax_layout": "TND"}
    rs.enable_cp_dtensor_dispatcher()
    try:
        outs = [
            OPS.fusion_attention_v3(*leaves, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends, **keywords)[0],
            *(
                op(*leaves, 4, "TND", actual_seq_qlen=ends.tolist(), actual_seq_kvlen=ends.tolist(), **keywords)[0]
                for op in (OPS.fusion_attention, OPS.fusion_attention_v2)
            ),
        ]
    finally:
        rs.disable_cp_dtensor_dispatcher()
    return max(relative(from_layout(out.full_tensor(), "TND", 4), right.out) for out in outs)


def outside_the_mesh(group: dist.ProcessGroup) -> dict[str, str]:
    """Ranks 2 and 3 are in no mesh of ranks 0 and 1: they take part in nothing and get empty results."""
    mesh = DeviceMesh("cpu", [0, 1])
    x = distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)], src_data_rank=None).requires_grad_()
    out = rs.attention(x, x, x, mask=rs.causal())
    contract = OPS.fusion_attention_v3(x, x, x, 2, "BNSD")[0]
    return {
        "shape": str(list(out.shape)),
        "rows": str(out.to_local().numel()),
        "contract": str(contract.to_local().numel()),
    }

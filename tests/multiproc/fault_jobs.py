"""Jobs of the pool for test_faults: one rank is wrong, or all are, in one of the ways that once failed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import oracle
import torch
import torch.distributed as dist
from fronts import OnDTensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from trials import Arena, Told

import ringspan as rs

OPS = torch.ops.ringspan
ROWS, HEADS = 4, 4
META = "meta"


def tensors(dtype: torch.dtype = torch.float32, rows: int = ROWS, seed: int = 1) -> list[torch.Tensor]:
    """q, k, v of one rank."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, rows, 8, generator=source).to(dtype).requires_grad_() for _ in range(3)]


def odd_calls(
    arena: Arena, odd: int, right: dict[str, Any], wrong: dict[str, dict[str, Any]], call: Callable[..., Any]
) -> dict[str, Told]:
    """What this rank saw of `call(**right)` where the odd rank gives one of `wrong` beside. None: all ranks do."""
    found = {}
    for name, changes in wrong.items():
        if arena.is_used_up:
            break
        given = right | (changes if odd in (None, arena.rank) else {})
        found[name] = arena.trial(functools.partial(call, **given))
    return found


def dtypes_of_pair_tensors(group: dist.ProcessGroup, fresh: list, schedule: Any) -> dict[str, Told]:
    """A bias, a float mask or a mask of another dtype on the last rank."""
    arena = Arena(group, fresh)
    inputs = tensors()
    shape, odd = (1, HEADS, ROWS, ROWS * arena.world), arena.rank == arena.world - 1
    found = {}
    pairs = {
        "bf16, fp16": ("bias", torch.bfloat16, torch.float16),
        "fp32, bf16": ("bias", torch.float32, torch.bfloat16),
        "fp16, bf16 as a mask": ("attn_mask", torch.float16, torch.bfloat16),
        "bool, fp32": ("attn_mask", torch.bool, torch.float32),
    }
    for name, (argument, first, second) in pairs.items():
        tensor = torch.ones(shape).to(second if odd else first)
        call = functools.partial(rs.attention, *inputs, group=arena.group, schedule=schedule)
        found[name] = arena.trial(functools.partial(call, **{argument: tensor}))
    return found


def _meta_arguments(world: int) -> dict[str, dict[str, Any]]:
    pair = (1, 1, ROWS, ROWS * world)
    return {
        "key": {"key": torch.empty(1, HEADS, ROWS, 8, device=META)},
        "value": {"value": torch.empty(1, HEADS, ROWS, 8, device=META)},
        "query": {"query": torch.empty(1, HEADS, ROWS, 8, device=META)},
        "sink": {"sink": torch.empty(HEADS, device=META)},
        "attn_mask": {"attn_mask": torch.empty(pair, dtype=torch.bool, device=META)},
        "float attn_mask": {"attn_mask": torch.empty(pair, device=META)},
        "bias": {"bias": torch.empty(pair, device=META)},
        "slopes": {"bias": rs.alibi(torch.empty(HEADS, device=META))},
        "seed": {"dropout_p": 0.5, "seed": torch.empty(1, dtype=torch.int64, device=META)},
    }


def _meta_of_contract(world: int) -> dict[str, dict[str, Any]]:
    pair, table = (1, HEADS, ROWS, ROWS * world), {"dtype": torch.int64, "device": META}
    return {
        "key": {"key": torch.empty(1, HEADS, ROWS, 8, device=META)},
        "pse": {"pse": torch.empty(pair, device=META)},
        "atten_mask": {"atten_mask": torch.empty(pair, dtype=torch.bool, device=META), "sparse_mode": 1},
        "sink": {"sink": torch.empty(HEADS, device=META)},
        "q_map": {"q_map": torch.empty(7, 6, **table)},
        "kv_map": {"kv_map": torch.empty(7, 6, **table)},
    }


def meta_tensors(group: dist.ProcessGroup, fresh: list, on_all: bool, contract: bool) -> dict[str, Told]:
    """Each tensor of a call on the meta device, on the last rank or on all, beside a query on the CPU."""
    arena = Arena(group, fresh)
    right = dict(zip(("query", "key", "value"), (x.detach() for x in tensors()), strict=True))
    odd = None if on_all else arena.world - 1
    if not contract:
        call: Callable[..., Any] = functools.partial(rs.attention, group=arena.group)
        return odd_calls(arena, odd, right, _meta_arguments(arena.world), call)
    call = functools.partial(OPS.fusion_attention_v3.cp, head_num=HEADS, input_layout="BNSD", group_name=arena.name)
    return odd_calls(arena, odd, right, _meta_of_contract(arena.world), call)


def dtensor_mistakes(group: dist.ProcessGroup, fresh: list) -> dict[str, Told]:
    """What the front of DTensors finds on the last rank alone."""
    arena = Arena(group, fresh)
    front = OnDTensors()
    setting = front.prepare(arena)
    other = DeviceMesh.from_group(arena.group, "cpu", mesh_dim_names=("another",))
    local = setting.leaves[1].to_local().detach()
    strange = DTensor.from_local(local, other, [Shard(2)], run_check=False)
    wrong = {
        "num_heads": {"num_heads": 3},
        "mask": {"mask": "causal"},
        "layout": {"layout": "XYZ"},
        "rows of a map": {"shard_map": rs.ShardMap.contiguous(99, arena.world)},
        "ranks of a map": {"shard_map": rs.ShardMap.contiguous(local.shape[2] * arena.world, arena.world + 1)},
        "meshes": {"key": strange},
        "group": {"group": arena.group},
    }

    def call(**given: Any) -> torch.Tensor:
        leaves = [setting.leaves[0], given.pop("key", setting.leaves[1]), setting.leaves[2]]
        return rs.attention(*leaves, **{"mask": rs.causal(), **given})

    found = odd_calls(arena, arena.world - 1, {}, wrong, call)
    if not arena.is_used_up:
        setting = front.prepare(arena)
        error = front.error(arena, setting)
        for told in found.values():
            told.value = error
    return found


def contents(group: dist.ProcessGroup, fresh: list, schedule: Any) -> dict[str, Told]:
    """Another number in the sink, or in ALiBi's slopes, of the last rank."""
    arena = Arena(group, fresh)
    q, k, v = tensors()
    other = torch.tensor([0.25, 0.25, 0.25, 5.5]), torch.full((HEADS,), 0.25)
    mine = other[0] if arena.rank == arena.world - 1 else other[1]
    calls = {
        "sink": {"sink": mine},
        "slopes": {"bias": rs.alibi(mine)},
        "slopes by batch": {"bias": rs.alibi(mine[None])},
    }
    found = {
        name: arena.trial(functools.partial(rs.attention, q, k, v, group=arena.group, schedule=schedule, **given))
        for name, given in calls.items()
    }
    found["sink of the contract"] = arena.trial(
        functools.partial(
            OPS.fusion_attention_v3.cp, q, k, v, HEADS, "BNSD", sink=mine, group_name=arena.name,
            schedule=schedule,
        )
    )  # fmt: skip
    return found


def one_wrong_argument(group: dist.ProcessGroup, fresh: list) -> dict[str, Told]:
    """What only Python's own machinery, or the dispatcher's, refused; on the last rank."""
    arena = Arena(group, fresh)
    q, k, v = tensors()
    wrong: dict[str, dict[str, Any]] = {
        "offset": {"dropout_p": 0.5, "seed": 1, "offset": 2**63},
        "batch_offset": {"dropout_p": 0.5, "seed": 1, "batch_offset": 2**64},
        "head_offset": {"dropout_p": 0.5, "seed": 1, "head_offset": 1.0},
        "scale": {"scale": 10**400},
        "total_heads": {"dropout_p": 0.5, "seed": 1, "total_heads": 8.5},
        "num_heads": {"num_heads": "2"},
        "assume_agreed": {"assume_agreed": "yes"},
        "return_stats": {"return_stats": "yes"},
        "an unknown keyword": {"attention_mask": None},
        "layout": {"layout": None},
        "exchange": {"exchange": ["p2p"]},
        "schedule": {"schedule": 7},
        "softcap": {"softcap": "30"},
        "seed": {"dropout_p": 0.5, "seed": 1.5},
        "dropout_p": {"dropout_p": "0.5"},
        "a list": {"bias": [0.0] * ROWS},
        "an empty mask": {"attn_mask": torch.ones((), dtype=torch.bool)},
        "complex": {"bias": torch.zeros(1, 1, dtype=torch.complex64)},
        "sparse": {"bias": torch.zeros(ROWS, ROWS * arena.world).to_sparse()},
    }
    for name, side in (("left", 2**63), ("right", 2**64)):
        try:
            wrong[f"window, {name}"] = {"mask": rs.window(**{"left": 1, name: side})}
        except ValueError:
            continue  # nobody has entered a call yet
    call = functools.partial(rs.attention, q, k, v, group=arena.group)
    return odd_calls(arena, arena.world - 1, {}, wrong, call)


def long_text(group: dist.ProcessGroup, fresh: list) -> Told:
    """The last rank refuses with 20 MB."""
    arena = Arena(group, fresh)
    mask = "x" * (20 << 20) if arena.rank == arena.world - 1 else "auto"
    return arena.trial(lambda: rs.attention(*tensors(), exchange=mask, group=arena.group))


def messages(group: dist.ProcessGroup, fresh: list) -> dict[str, Told]:
    """Disagreements of calls that have not the same optional arguments."""
    arena = Arena(group, fresh)
    q, k, v = tensors()
    rows = torch.ones(1, HEADS, ROWS, ROWS * arena.world)
    calls: dict[str, tuple[dict, dict]] = {
        "bias": ({"schedule": "q_ring", "bias": rows}, {"schedule": "q_ring"}),
        "attn_mask": ({"schedule": "q_ring"}, {"schedule": "q_ring", "attn_mask": rows > 0}),
        "both": ({"schedule": "ulysses", "attn_mask": rows > 0}, {"schedule": "ulysses", "bias": rows}),
        "softcap": ({"softcap": 3.0, "bias": rows}, {"softcap": 4.0, "bias": rows}),
        "scale": ({"scale": 0.1}, {"scale": 0.1 + 2**-56}),
        "ids": ({"mask": rs.documents(ids=ids_of(arena.world, 2))}, {"mask": rs.documents(ids=ids_of(arena.world, 3))}),
        "lengths": (
            {"mask": rs.documents(lengths=[[3, 1]])},
            {"mask": rs.documents(lengths=[[2, 2]])},
        ),
        "bands": ({"mask": rs.bands([(0, 4, 0, 4, -1, 1)])}, {"mask": rs.bands([(0, 4, 0, 4, -1, 2)])}),
        "segments": ({"shard_map": reversed_map(arena.world)}, {"shard_map": reversed_map(arena.world, 1)}),
        "heads of a bias": ({"schedule": "q_ring", "bias": rows}, {"schedule": "q_ring", "bias": rows[:, :1]}),
        "rows of a bias": ({"schedule": "q_ring", "bias": rows}, {"schedule": "q_ring", "bias": rows[:, :, :1]}),
        "seed": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": 0.5}),
    }
    found = {}
    for name, (first, second) in calls.items():
        given = second if arena.rank == arena.world - 1 else first
        found[name] = arena.trial(functools.partial(rs.attention, q, k, v, group=arena.group, **given))
    return found


def ids_of(world: int, last: int) -> torch.Tensor:
    """Many ids, of which the last differs."""
    ids = torch.ones(ROWS * world, dtype=torch.int64)
    ids[-1] = last
    return ids


def reversed_map(world: int, turned: int = 0) -> rs.ShardMap:
    """Segments in another order; `turned` ranks later."""
    places = [(rank + turned) % world for rank in reversed(range(world))]
    return rs.ShardMap.from_segments([[(0, ROWS * place, ROWS, 1)] for place in places])


def instruction_sets(group: dist.ProcessGroup, fresh: list, schedule: Any) -> dict[str, Any]:
    """The last rank computes by another instruction set."""
    arena = Arena(group, fresh)
    names = OPS._available_isas()
    own = OPS._isa()
    other = next((name for name in names if name != own), own)
    if arena.rank == arena.world - 1:
        OPS._force_isa(other)
    try:
        told = arena.trial(lambda: rs.attention(*tensors(), group=arena.group, schedule=schedule))
    finally:
        OPS._force_isa("")
    return {"names": (own, other), "told": told}


def empty_shards(group: dist.ProcessGroup, fresh: list) -> dict[str, Any]:
    """A rank without rows: what `shard` gives, and the gradients of attention and of `unshard(grad="sum")`."""
    arena = Arena(group, fresh)
    seq_len = arena.world + 1
    found: dict[str, Any] = {}
    for name, smap in {
        "head_tail": rs.ShardMap.head_tail(seq_len, arena.world),
        "lengths": rs.ShardMap.from_lengths([seq_len, *[0] * (arena.world - 1)]),
    }.items():
        q, k, v, dout = (torch.from_numpy(x) for x in oracle.draw(3, seq_len, 2, 2, 8))
        wholes = [x.requires_grad_() for x in (q, k, v)]
        parts = [smap.shard(x, arena.rank, 2) for x in wholes]
        found[f"{name} requires grad"] = all(x.requires_grad for x in parts)
        keep = oracle.keep_of(("causal",), seq_len, seq_len)
        right = oracle.attend(*(x.detach().numpy() for x in wholes), keep, dout.numpy())

        gradients: list[torch.Tensor] = []

        def attend(parts: list = parts, smap: Any = smap, dout: Any = dout, wholes: list = wholes) -> list:
            out = rs.attention(*parts, mask=rs.causal(), shard_map=smap, group=arena.group)
            return list(torch.autograd.grad(out, wholes, smap.shard(dout, arena.rank, 2)))

        told = arena.trial(lambda attend=attend, gradients=gradients: gradients.extend(attend()))
        found[f"{name} attention"] = told
        if gradients:
            for gradient in gradients:
                dist.all_reduce(gradient, group=group)
            rights = (right.dq, right.dk, right.dv)
            told.value = max(oracle.error(x.numpy(), y) for x, y in zip(gradients, rights, strict=True))
        found[f"{name} unshard"] = _unshard_gradient(arena, smap)
    return found


def _unshard_gradient(arena: Arena, smap: rs.ShardMap) -> Told:
    source = torch.Generator().manual_seed(4)
    weights = torch.randn(arena.world, smap.seq_len, generator=source, dtype=torch.float64)
    whole = torch.randn(smap.seq_len, generator=source, dtype=torch.float64).requires_grad_()
    local = smap.shard(whole, arena.rank, 0)

    errors = []

    def call() -> None:
        gathered = smap.unshard(local * 2, group=arena.group, dim=0, grad="sum")
        loss = (gathered * weights[arena.rank]).sum()
        (gradient,) = torch.autograd.grad(loss, whole)
        right = smap.shard(2 * weights.sum(0), arena.rank, 0)
        errors.append(oracle.error(smap.shard(gradient, arena.rank, 0).numpy(), right.detach().numpy()))

    told = arena.trial(call)
    told.value = max(errors, default=float("inf"))
    return told


def statistics_of_the_contract(group: dist.ProcessGroup) -> dict[str, bool]:
    """Whether softmax_max and softmax_sum ask for gradients that there are none of."""
    inputs = [x.requires_grad_() for x in tensors()]
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    placed = [DTensor.from_local(x.detach(), mesh, [Shard(2)], run_check=False).requires_grad_() for x in inputs]
    results = {
        "alone": OPS.fusion_attention_v3(*inputs, HEADS, "BNSD"),
        "version 1": OPS.fusion_attention(*inputs, HEADS, "BNSD"),
        "version 2": OPS.fusion_attention_v2(*inputs, HEADS, "BNSD"),
        ".cp": OPS.fusion_attention_v3.cp(*inputs, HEADS, "BNSD", group_name=group.group_name),
        "DTensors": OPS.fusion_attention_v3(*placed, HEADS, "BNSD"),
    }
    found = {}
    for name, result in results.items():
        found[f"{name} out"] = result[0].requires_grad
        found[f"{name} statistics"] = result[1].requires_grad or result[2].requires_grad
    return found

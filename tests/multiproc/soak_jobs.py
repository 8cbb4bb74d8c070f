"""Jobs of the pool for the soak: one case through any front, forward and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import torch
import torch.distributed as dist
from cases import Case, Local, bias_tensor, compare, expect, map_of, mask_tensor, positions_of, run_case
from npu_cases import EMPTY, upper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import ringspan as rs

OPS = torch.ops.ringspan
ROW_AXIS = {"BNSD": 2, "BSND": 1, "BSH": 1, "SBH": 0, "TND": 0}


@dataclass(frozen=True)
class Soaked:
    """A case, and through which front: "attention", "DTensors", "contract", "flex" or "compiled"."""

    front: str
    case: Case


def errors(group: dist.ProcessGroup, fresh: list, draws: list[Soaked]) -> list[dict[str, float]]:
    """The largest error of each result of each draw on this rank; what is raised is an error of inf.

    A draw of which one rank only raised may have left its group out of step: the next has another one.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    spares, found = list(fresh), []
    for one in draws:
        raised = ""
        try:
            local = FRONTS[one.front](one.case, spares[0], rank, world)
            found.append(compare(one.case, local, expect(one.case, world)))
        except Exception as error:
            raised = type(error).__name__
            found.append({f"{raised} {str(error)[:400]}": float("inf")})
        of_all: list[str] = [""] * world
        dist.all_gather_object(of_all, raised, group=group)
        if len(set(of_all)) > 1 or "DistBackendError" in of_all:
            spares.pop(0)
        if not spares:
            break
    return found


def _plain(case: Case, group: Any, rank: int, world: int) -> Local:
    return run_case(case, group, rank, world)


def _compiled(case: Case, group: Any, rank: int, world: int) -> Local:
    torch._dynamo.reset()

    def attend(*leaves: torch.Tensor, **given: Any) -> Any:
        def step(*leaves: torch.Tensor) -> Any:
            return rs.attention(*leaves, **given)

        return torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)(*leaves)

    return run_case(case, group, rank, world, attend)


def _on_dtensors(case: Case, group: Any, rank: int, world: int) -> Local:
    """Rows over the ranks, as DTensor counts them; results and gradients of this rank come back."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    smap = map_of(case.split, case.seq_len, world)

    def whole(x: torch.Tensor, axis: int) -> DTensor:
        shape = list(x.shape)
        shape[axis] = sum(smap.local_rows(place) for place in range(world))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, mesh, [Shard(axis)], run_check=False, shape=torch.Size(shape), stride=stride)

    def shared(x: torch.Tensor) -> DTensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False, grad_placements=[Partial()])

    def attend(*leaves: torch.Tensor, **given: Any) -> Any:
        placed = [whole(x, ROW_AXIS[case.layout]) for x in leaves]
        for name, axes in (("attn_mask", case.attn_mask), ("bias", case.bias), ("sink", None)):
            tensor = given.get(name)
            if isinstance(tensor, torch.Tensor):
                axes = case.bias if tensor.is_floating_point() else axes
                by_rows = name != "sink" and "S" in (axes or "")
                given[name] = whole(tensor, tensor.dim() - 2) if by_rows else shared(tensor)
        for name in ("group", "kv_shard_map"):
            given.pop(name)
        out, stats = rs.attention(*placed, **given)
        return out.to_local(), rs.Stats(*(one.to_local() for one in stats))

    return run_case(case, group, rank, world, attend)


def _in_contract(case: Case, group: Any, rank: int, world: int) -> Local:
    """fusion_attention_v3.cp: the mask by a sparse mode, the bias as pse, a boolean tensor as a full mask."""

    def attend(*leaves: torch.Tensor, **given: Any) -> Any:
        keywords: dict[str, Any] = {"scale": given["scale"], "sink": given["sink"]}
        kind = case.mask[0]
        if given.get("attn_mask") is not None:
            keywords |= {"atten_mask": ~given["attn_mask"], "sparse_mode": 1}
        elif kind != "full":
            keywords |= {"atten_mask": upper(), "sparse_mode": 2 if kind == "causal" else 4}
            if kind == "window":
                keywords |= dict(zip(("pre_tockens", "next_tockens"), case.mask[1:3], strict=True))
        if given.get("bias") is not None:
            keywords["pse"] = given["bias"] / given["scale"]  # added before the scale
        maps = [given["shard_map"], given["kv_shard_map"] or given["shard_map"]]
        out, row_max, row_sum, *_ = OPS.fusion_attention_v3.cp(
            *leaves, case.q_heads, case.layout, **keywords, group_name=group.group_name,
            q_map=maps[0].to_tensor(), kv_map=maps[1].to_tensor(),
            schedule=given["schedule"], exchange=given["exchange"],
        )  # fmt: skip
        row_max, row_sum = row_max.detach()[..., 0], row_sum.detach()[..., 0]
        lse = torch.where(row_sum == float(EMPTY), -torch.inf, row_max + row_sum.log())
        return out, rs.Stats(row_max, row_sum, lse)

    return run_case(case, group, rank, world, attend)


def _in_flex(case: Case, group: Any, rank: int, world: int) -> Local:
    """flex_attention: tensors are captured whole by mods, and so their gradients are of the whole."""
    from ringspan import flex

    from_whole: dict[str, torch.Tensor] = {}
    full = (case.batch, case.q_heads, case.seq_len, case.kv_len or case.seq_len)
    if case.bias is not None:
        bias = torch.from_numpy(bias_tensor(case)).to(getattr(torch, case.dtype)).requires_grad_()
        from_whole["bias"] = bias
    table = None
    if case.attn_mask is not None:
        kept = oracle.keep_of(case.mask, full[2], full[3])[:, None] & mask_tensor(case)
        table = torch.from_numpy(kept).expand(full)

    def score_mod(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        if case.softcap is not None:
            score = case.softcap * torch.tanh(score / case.softcap)
        return score + from_whole["bias"].expand(full)[b, h, i, j] if from_whole else score

    def attend(*leaves: torch.Tensor, **given: Any) -> Any:
        blocks = given["mask"]
        if table is not None:
            blocks = lambda b, h, i, j: table[b, h, i, j]  # noqa: E731
        out, lse = flex.flex_attention(
            *leaves, score_mod if from_whole or case.softcap else None, blocks, given["scale"], True, True,
            shard_map=given["shard_map"], kv_shard_map=given["kv_shard_map"], group=group,
            schedule=given["schedule"], exchange=given["exchange"],
        )  # fmt: skip
        return out, rs.Stats(lse, lse, lse)

    local = run_case(case.but(bias=None), group, rank, world, attend, from_whole.get("bias"))
    if local.dbias is not None and "S" in case.bias:
        rows = oracle.take_rows(local.dbias.double().numpy(), positions_of(case, rank, world)[0])
        local.dbias = torch.from_numpy(rows)
    return local


FRONTS: dict[str, Callable[[Case, Any, int, int], Local]] = {
    "attention": _plain,
    "DTensors": _on_dtensors,
    "contract": _in_contract,
    "flex": _in_flex,
    "compiled": _compiled,
}

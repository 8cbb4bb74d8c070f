"""The collective behind `ShardMap.unshard`: local rows of every rank become the whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.group import Group, group_of, name_and_world, rank_in, world_mismatch

if TYPE_CHECKING:
    from ringspan.shard_map import ShardMap

_GRADS = ("sum", "slice")


def gather_rows(smap: ShardMap, x: Tensor, group: Group, dim: int, grad: str | None, batch_dim: int) -> Tensor:
    """See `ShardMap.unshard`."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("unshard is not offered inside compiled code; call it outside torch.compile")
    group_name, world = name_and_world(group)
    if group is None:
        torch.ops.ringspan._check_alone("unshard")
    rank = rank_in(group)
    if not isinstance(x, Tensor):
        raise ValueError(f"x is of {type(x).__name__}; give this rank's rows as a tensor")
    if world != smap.world_size:
        raise world_mismatch("the map", smap.world_size, group, world)
    smap._check_rows(x, dim, smap.local_rows(rank), f"rank {rank}")
    if smap.num_lists > 1:
        smap._check_batch(x, batch_dim)
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if grad not in _GRADS and (grad is not None or needs_grad):
        raise ValueError(
            f"unshard(grad={grad!r}): x {'requires' if needs_grad else 'does not require'} gradients; give 'sum' "
            "if each rank's loss is its own part, 'slice' if all ranks compute the same loss"
        )
    order = _source_rows(smap)
    dim, batch_dim = dim % x.dim(), batch_dim % x.dim()
    name = group_name or ""
    torch.ops.ringspan._agree(name, _signature(smap, x, dim, batch_dim, grad if needs_grad else None))
    return _Unshard.apply(x, _Call(smap, name, rank, dim, batch_dim, grad, order))


class _Call:
    """What both directions of one unshard need; no tensors that carry gradients."""

    def __init__(
        self,
        smap: ShardMap,
        group_name: str,
        rank: int,
        dim: int,
        batch_dim: int,
        grad: str | None,
        order: list[Tensor],
    ) -> None:
        self.smap, self.group_name, self.rank = smap, group_name, rank
        self.dim, self.batch_dim, self.grad, self.order = dim, batch_dim, grad, order
        self.slot = _slot_rows(smap)


class _Unshard(torch.autograd.Function):
    """Forward: all_gather of equal slots, then a permutation. Backward: its transpose, or this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return _permute(_all_gather_slots(x, call), call, call.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        call = ctx.call
        smap, dim = call.smap, call.dim
        if call.grad == "slice" or not call.group_name:
            return smap.shard(grad, call.rank, dim, call.batch_dim), None
        torch.ops.ringspan._agree(call.group_name, _signature(smap, grad, dim, call.batch_dim, "backward"))
        slots = [
            _pad_rows(smap.shard(grad, rank, dim, call.batch_dim), dim, call.slot) for rank in range(smap.world_size)
        ]
        packed = torch.stack(slots)
        dist.all_reduce(packed, group=group_of(call.group_name))
        return packed[call.rank].narrow(dim, 0, smap.local_rows(call.rank)), None


def _all_gather_slots(x: Tensor, call: _Call) -> Tensor:
    """[..., world * slot rows, ...] along dim: the rows of rank r begin at r * slot."""
    padded = _pad_rows(x, call.dim, call.slot).contiguous()
    if not call.group_name:
        return padded
    slots = [torch.empty_like(padded) for _ in range(call.smap.world_size)]
    dist.all_gather(slots, padded, group=group_of(call.group_name))
    return torch.cat(slots, call.dim)


def _permute(slots: Tensor, call: _Call, order: list[Tensor]) -> Tensor:
    if len(order) == 1:
        return slots.index_select(call.dim, order[0])
    parts = [slots.narrow(call.batch_dim, batch, 1).index_select(call.dim, rows) for batch, rows in enumerate(order)]
    return torch.cat(parts, call.batch_dim)


def _source_rows(smap: ShardMap) -> list[Tensor]:
    """For each batch list the row among all slots that holds each position. ValueError where none or two do."""
    slot = _slot_rows(smap)
    order = []
    for batch in range(smap.num_lists):
        rows = torch.full((smap.seq_len,), -1, dtype=torch.int64)
        held = 0
        for rank in range(smap.world_size):
            positions = smap.positions(rank, batch)
            local = (positions >= 0).nonzero().flatten()
            rows[positions[local]] = rank * slot + local
            held += local.numel()
        if held != smap.seq_len or bool((rows < 0).any()):
            raise ValueError(
                f"unshard: the map holds {held} rows for {smap.seq_len} positions; each position must be held once"
            )
        order.append(rows)
    return order


def _slot_rows(smap: ShardMap) -> int:
    return max(smap.local_rows(rank) for rank in range(smap.world_size))


def _pad_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    missing = rows - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _signature(smap: ShardMap, x: Tensor, dim: int, batch_dim: int, grad: str | None) -> str:
    shape = ["rows" if k == dim else size for k, size in enumerate(x.shape)]
    return f"unshard {shape} {x.dtype} batch_dim {batch_dim} grad {grad} {smap}"

"""The collective behind `ShardMap.unshard`: local rows of every rank become the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringspan.group import Group, name_and_world, rank_in, world_mismatch
from ringspan.place import place_of_caller

_GRADS = ("sum", "slice")


class Map(Protocol):
    """What is asked of a `ShardMap`, which stands above this module."""

    @property
    def seq_len(self) -> int:
        """Positions of the whole."""

    @property
    def world_size(self) -> int:
        """Ranks that share it out."""

    @property
    def num_lists(self) -> int:
        """Batch entries that are told apart."""

    def local_rows(self, rank: int) -> int:
        """Of the local tensors of `rank`."""

    def positions(self, rank: int, batch: int = 0) -> Tensor:
        """Of the local rows, -1 for padding."""

    def shard(self, x: Tensor, rank: int, dim: int, batch_dim: int = 0) -> Tensor:
        """The rows of `rank` out of the whole."""


@dataclass(frozen=True)
class Axes:
    """Where rows and batch entries lie in a tensor."""

    rows: int
    batch: int


def place_in(group: Group, world_size: int, x: Tensor) -> tuple[str, int]:
    """The name of the group ("" = this process alone) and the rank in it. Raises what `unshard` does for these."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("unshard is not offered inside compiled code; call it outside torch.compile")
    group_name, world = name_and_world(group)
    if group is None:
        torch.ops.ringspan._check_alone("unshard")
    rank = rank_in(group)
    if not isinstance(x, Tensor):
        raise ValueError(f"x is of {type(x).__name__}; give this rank's rows as a tensor")
    if world != world_size:
        raise world_mismatch("the map", world_size, group, world)
    return group_name or "", rank


def gather_rows(smap: Map, x: Tensor, place: tuple[str, int], axes: Axes, grad: str | None) -> Tensor:
    """See `ShardMap.unshard`. `place`: from `place_in`; x has been held against the map."""
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if grad not in _GRADS and (grad is not None or needs_grad):
        raise ValueError(
            f"unshard(grad={grad!r}): x {'requires' if needs_grad else 'does not require'} gradients; give 'sum' "
            "if each rank's loss is its own part, 'slice' if all ranks compute the same loss"
        )
    slot = max(smap.local_rows(rank) for rank in range(smap.world_size))
    order = _source_rows(smap, slot)
    axes = Axes(axes.rows % x.dim(), axes.batch % x.dim())
    name, rank = place
    call = _Call(smap, name, rank, axes, grad, order, slot, needs_grad, place_of_caller())
    return _Unshard.apply(x, call)


@dataclass(frozen=True)
class _Call:
    """What both directions of one unshard need; no tensors that carry gradients."""

    smap: Map
    group_name: str
    rank: int
    axes: Axes
    grad: str | None
    order: list[Tensor]
    slot: int  # rows that every rank sends
    needs_grad: bool
    made_at: str  # of the program


class _Unshard(torch.autograd.Function):
    """Forward: all_gather of equal slots, then a permutation. Backward: its transpose, or this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        axes, slots = call.axes, pad_rows(x, call.axes.rows, call.slot).contiguous()
        if call.group_name:
            signature = _signature(call.smap, x, axes, call.grad if call.needs_grad else None)
            of_ranks = _all_gather(slots, call, signature)
            slots = torch.cat(of_ranks.unbind(0), axes.rows)
        if len(call.order) == 1:
            return slots.index_select(axes.rows, call.order[0])
        entries = enumerate(call.order)
        parts = [slots.narrow(axes.batch, entry, 1).index_select(axes.rows, rows) for entry, rows in entries]
        return torch.cat(parts, axes.batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        call = ctx.call
        smap, dim, batch_dim = call.smap, call.axes.rows, call.axes.batch
        if call.grad == "slice" or not call.group_name:
            return smap.shard(grad, call.rank, dim, batch_dim), None
        slots = [pad_rows(smap.shard(grad, rank, dim, batch_dim), dim, call.slot) for rank in range(smap.world_size)]
        packed = _all_reduce(torch.stack(slots), call, _signature(smap, grad, call.axes, "backward"))
        return packed[call.rank].narrow(dim, 0, smap.local_rows(call.rank)), None


# Backends know no complex numbers.
def _all_gather(x: Tensor, call: _Call, signature: str) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(_all_gather(torch.view_as_real(x), call, signature))
    return torch.ops.ringspan._all_gather(x, call.group_name, signature, call.made_at)


def _all_reduce(x: Tensor, call: _Call, signature: str) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(_all_reduce(torch.view_as_real(x), call, signature))
    return torch.ops.ringspan._all_reduce(x, call.group_name, signature, call.made_at, True)


def _source_rows(smap: Map, slot: int) -> list[Tensor]:
    """For each batch list the row among all slots that holds each position. ValueError where none or two do."""
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


def zero_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """As many rows of zeros, else like `x`."""
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_zeros(shape)


def pad_rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """`x` with zeros after it, `rows` in all."""
    missing = rows - x.shape[dim]
    return x if missing == 0 else torch.cat([x, zero_rows(x, dim, missing)], dim)


def _signature(smap: Map, x: Tensor, axes: Axes, grad: str | None) -> str:
    shape = ["rows" if k == axes.rows else size for k, size in enumerate(x.shape)]
    return f"unshard {shape} {x.dtype} batch_dim {axes.batch} grad {grad} {smap}"

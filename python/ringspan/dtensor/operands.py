"""DTensors to the local tensors of one call, and results back to DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ringspan.dtensor.arrangement import Sharding
from ringspan.dtensor.placements import chunk_rows
from ringspan.dtensor.private import allows_implicit_replication, contiguous_stride, local_of
from ringspan.shard_map import ShardMap

MakeMap = Callable[[int, int], ShardMap]


def common_mesh(named: dict[str, Tensor | None]) -> DeviceMesh:
    """The mesh of all DTensors among them. ValueError where they lie on different ones."""
    mesh, first = None, ""
    for name, tensor in named.items():
        if not isinstance(tensor, DTensor):
            continue
        if mesh is None:
            mesh, first = tensor.device_mesh, name
        elif tensor.device_mesh is not mesh and tensor.device_mesh != mesh:
            raise ValueError(
                f"{name} lies on {tensor.device_mesh}, {first} on {mesh}; put all DTensors of a call on one mesh"
            )
    if mesh is None:
        raise ValueError("no argument is a DTensor")
    return mesh


def takes_part(mesh: DeviceMesh) -> bool:
    """Whether this rank is in the mesh. Traced code is never run by others."""
    return torch.compiler.is_compiling() or mesh.get_coordinate() is not None


def as_dtensor(name: str, tensor: Tensor, mesh: DeviceMesh, was_accepted: bool = False) -> DTensor:
    """Itself, or a plain tensor as a replicated one, where the dispatcher allows that or did so in the forward."""
    if isinstance(tensor, DTensor):
        return tensor
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is of {type(tensor).__name__}; give a tensor")
    if not was_accepted and not allows_implicit_replication():
        raise ValueError(
            f"{name} is a plain tensor beside DTensors; distribute it, or call "
            "ringspan.enable_cp_dtensor_dispatcher(), under which plain tensors count as replicated"
        )
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def in_place(name: str, tensor: Tensor, sharding: Sharding, was_accepted: bool = False) -> DTensor:
    """Where it is to lie, by redistribution if it lies elsewhere."""
    given = as_dtensor(name, tensor, sharding.mesh, was_accepted)
    if given.placements == sharding.placements:
        return given
    # In the contract's rules, below autograd, PyTorch 2.12 cannot redistribute what requires grad: DTensor has no rule
    # of detach_ there.
    source: Any = given if torch.is_grad_enabled() else given.detach()
    return source.redistribute(placements=sharding.placements)


class _LocalParts(torch.autograd.Function):
    """`to_local` of several DTensors in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, shardings: Sequence[Sharding], *tensors: DTensor) -> tuple[Tensor, ...]:
        ctx.shardings = shardings
        ctx.set_materialize_grads(False)
        return tuple(local_of(tensor).detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        whole = (
            None if gradient is None else sharding.wrap_gradient(gradient)
            for gradient, sharding in zip(gradients, ctx.shardings, strict=True)
        )
        return None, *whole


class _Wholes(torch.autograd.Function):
    """`from_local` of several tensors in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, shardings: Sequence[Sharding], *tensors: Tensor) -> tuple[DTensor, ...]:
        ctx.shardings = shardings
        ctx.set_materialize_grads(False)
        return tuple(sharding.wrap(tensor.detach()) for tensor, sharding in zip(tensors, shardings, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        parts = []
        for gradient, sharding in zip(gradients, ctx.shardings, strict=True):
            if gradient is not None and gradient.placements != sharding.placements:
                gradient = gradient.redistribute(placements=sharding.placements)
            parts.append(None if gradient is None else local_of(gradient))
        return None, *parts


def local_parts(tensors: Sequence[DTensor], shardings: Sequence[Sharding]) -> Sequence[Tensor]:
    """This rank's part of each, as its sharding cuts it; their gradients come back as the parts that they are."""
    if torch.compiler.is_compiling():
        return [
            tensor.to_local(grad_placements=sharding.gradient_placements)
            for tensor, sharding in zip(tensors, shardings, strict=True)
        ]
    return _LocalParts.apply(shardings, *tensors) if _is_tracked(tensors) else [local_of(tensor) for tensor in tensors]


def wholes(parts: Sequence[Tensor], shardings: Sequence[Sharding]) -> Sequence[DTensor]:
    """Results of this rank, each the part of a whole with its sharding."""
    if torch.compiler.is_compiling():
        return [
            DTensor.from_local(
                local, sharding.mesh, sharding.placements, run_check=False,
                shape=torch.Size(sharding.shape), stride=contiguous_stride(sharding.shape),
            )
            for local, sharding in zip(parts, shardings, strict=True)
        ]  # fmt: skip
    if _is_tracked(parts):
        return _Wholes.apply(shardings, *parts)
    return [sharding.wrap(local) for local, sharding in zip(parts, shardings, strict=True)]


def _is_tracked(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd is to know about what is made of them."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def map_of(make: MakeMap, seq_len: int, world: int) -> ShardMap:
    """Who holds which positions of a DTensor whose rows are sharded over `world` ranks.

    DTensor decides how many rows a rank has, `make` which positions they are. ValueError where the two disagree.
    """
    if make is not ShardMap.contiguous:
        return check_rows(make(seq_len, world), seq_len, world)
    if seq_len % world == 0:
        return ShardMap.contiguous(seq_len, world)
    return ShardMap.from_lengths(chunk_rows(seq_len, world))


def check_rows(smap: ShardMap, seq_len: int, world: int) -> ShardMap:
    """`smap`, where it gives each rank as many rows as DTensor does; ValueError else."""
    if not isinstance(smap, ShardMap):
        raise ValueError(f"shard_map({seq_len}, {world}) gave {type(smap).__name__}; it must give a ShardMap")
    if smap.world_size != world:
        raise ValueError(
            f"the shard map splits over {smap.world_size} ranks, but {world} ranks share the sequence of these DTensors"
        )
    for rank, rows in enumerate(chunk_rows(seq_len, world)):
        if smap.local_rows(rank) != rows:
            raise ValueError(
                f"the shard map gives rank {rank} {smap.local_rows(rank)} rows, but a DTensor of {seq_len} rows on "
                f"{world} ranks gives it {rows}; choose a map of equal shards, or pass local tensors"
            )
    return smap

"""DTensors to the local tensors of one call, and results back to DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ringspan.call import Sizes, read_sizes
from ringspan.dtensor.placements import Roles, TensorAxes, choose_roles, chunk_rows
from ringspan.dtensor.private import allows_implicit_replication, contiguous_stride, dtensor_of, local_of, spec_of
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
        elif tensor.device_mesh != mesh:
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
    if not was_accepted and not allows_implicit_replication():
        raise ValueError(
            f"{name} is a plain tensor beside DTensors; distribute it, or call "
            "ringspan.enable_cp_dtensor_dispatcher(), under which plain tensors count as replicated"
        )
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def read_operands(
    named: dict[str, Any], mesh: DeviceMesh, layout: str, num_heads: int | None
) -> tuple[list[DTensor], Sizes, Roles]:
    """Query, key and value as DTensors, the sizes of the whole call, and what the mesh axes do in it."""
    tensors = [as_dtensor(name, named[name], mesh) for name in ("query", "key", "value")]
    sizes = read_sizes(*(tensor.shape for tensor in tensors), layout, num_heads)
    return tensors, sizes, choose_roles(mesh, [tensor.placements for tensor in tensors], sizes, layout)


def in_place(name: str, tensor: Tensor, roles: Roles, axes: TensorAxes, was_accepted: bool = False) -> DTensor:
    """Where the roles want it, by redistribution if it lies elsewhere."""
    wanted = roles.placements(axes)
    given = as_dtensor(name, tensor, roles.mesh, was_accepted)
    return given if given.placements == wanted else given.redistribute(placements=wanted)


class _LocalParts(torch.autograd.Function):
    """`to_local` of several DTensors in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, specs: Sequence[Any], *tensors: DTensor) -> tuple[Tensor, ...]:
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(local_of(tensor).detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        whole = (
            None if gradient is None else dtensor_of(gradient, spec)
            for gradient, spec in zip(gradients, ctx.specs, strict=True)
        )
        return None, *whole


class _Whole(torch.autograd.Function):
    """`from_local` of several tensors in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, specs: Sequence[Any], *tensors: Tensor) -> tuple[DTensor, ...]:
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(dtensor_of(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        parts = []
        for gradient, spec in zip(gradients, ctx.specs, strict=True):
            if gradient is not None and gradient.placements != spec.placements:
                gradient = gradient.redistribute(placements=spec.placements)
            parts.append(None if gradient is None else local_of(gradient))
        return None, *parts


Placed = tuple[str, Tensor | None, TensorAxes]


def local_parts(placed: Sequence[Placed], roles: Roles) -> dict[str, Tensor | None]:
    """This rank's part of each, by name; their gradients come back as the parts that they are."""
    given = {name: in_place(name, tensor, roles, axes) for name, tensor, axes in placed if tensor is not None}
    gradients = [roles.gradient_placements(axes) for _, tensor, axes in placed if tensor is not None]
    parts: dict[str, Tensor | None] = {name: None for name, _, _ in placed}
    if torch.compiler.is_compiling():
        for (name, tensor), where in zip(given.items(), gradients, strict=True):
            parts[name] = tensor.to_local(grad_placements=where)
        return parts
    specs = [
        spec_of(roles.mesh, where, tuple(tensor.shape), tensor.dtype)
        for tensor, where in zip(given.values(), gradients, strict=True)
    ]
    return parts | dict(zip(given, _LocalParts.apply(specs, *given.values()), strict=True))


def wholes(parts: Sequence[tuple[Tensor, Sequence[int], TensorAxes]], roles: Roles) -> list[DTensor]:
    """Results of this rank, each a part of a whole of the given shape."""
    where = [roles.placements(axes) for _, _, axes in parts]
    if torch.compiler.is_compiling():
        return [
            DTensor.from_local(
                local, roles.mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
            )
            for (local, shape, _), placements in zip(parts, where, strict=True)
        ]
    specs = [
        spec_of(roles.mesh, placements, tuple(shape), local.dtype)
        for (local, shape, _), placements in zip(parts, where, strict=True)
    ]
    return list(_Whole.apply(specs, *(local for local, _, _ in parts)))


def wrap(local: Tensor, shape: Sequence[int], roles: Roles, axes: TensorAxes) -> DTensor:
    """One of them, below autograd."""
    return dtensor_of(local, spec_of(roles.mesh, roles.placements(axes), tuple(shape), local.dtype))


def wrap_gradient(local: Tensor, shape: Sequence[int], roles: Roles, axes: TensorAxes) -> DTensor:
    """The same for a gradient, which may be a part of a sum."""
    return dtensor_of(local, spec_of(roles.mesh, roles.gradient_placements(axes), tuple(shape), local.dtype))


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

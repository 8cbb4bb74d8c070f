"""DTensors to the local tensors of one call, and results back to DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ringspan.dtensor.placements import Roles, TensorAxes, chunk_rows
from ringspan.dtensor.private import allows_implicit_replication
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


def local_part(name: str, tensor: Tensor | None, roles: Roles, axes: TensorAxes) -> Tensor | None:
    """This rank's part where the roles want it; its gradients come back as the parts that they are."""
    if tensor is None:
        return None
    wanted = roles.placements(axes)
    given = as_dtensor(name, tensor, roles.mesh)
    if given.placements != wanted:
        given = given.redistribute(placements=wanted)
    return given.to_local(grad_placements=roles.gradient_placements(axes))


def wrap(local: Tensor, shape: Sequence[int], roles: Roles, axes: TensorAxes) -> DTensor:
    """A result of this rank as a part of the whole, which has `shape`."""
    return _wrap(local, shape, roles, roles.placements(axes))


def wrap_gradient(local: Tensor, shape: Sequence[int], roles: Roles, axes: TensorAxes) -> DTensor:
    """The same for a gradient, which may be a part of a sum."""
    return _wrap(local, shape, roles, roles.gradient_placements(axes))


def _wrap(local: Tensor, shape: Sequence[int], roles: Roles, placements: Sequence[Any]) -> DTensor:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    return DTensor.from_local(
        local, roles.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


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

"""How a call on DTensors is arranged on its mesh: all that follows from how query, key and value lie, and is the same
for every call on tensors that lie so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ringspan.call import Sizes, read_sizes
from ringspan.dtensor.placements import (
    Roles,
    TensorAxes,
    axes_of_layout,
    axes_of_stats,
    choose_roles,
    out_shape,
    stats_shape,
)
from ringspan.dtensor.private import dtensor_of, spec_in, spec_of
from ringspan.names import STAT_SLOTS

OPERANDS = ("query", "key", "value")


@dataclass(frozen=True)
class Sharding:
    """Where a whole tensor lies on the mesh, and where the gradient does that each rank gets for its part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    gradient_placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @functools.cached_property
    def _spec(self) -> Any:
        return spec_of(self.mesh, self.placements, self.shape, self.dtype)

    @functools.cached_property
    def _of_gradient(self) -> Sharding:
        return replace(self, placements=self.gradient_placements)

    def wrap(self, local: Tensor) -> DTensor:
        """The whole, of which `local` is this rank's part. Below autograd. Autocast gives results another dtype."""
        same = local.dtype == self.dtype
        return dtensor_of(local, self._spec if same else spec_of(self.mesh, self.placements, self.shape, local.dtype))

    def wrap_gradient(self, local: Tensor) -> DTensor:
        """The same of its gradient."""
        return self._of_gradient.wrap(local)


@dataclass(frozen=True)
class Arrangement:
    """The sizes of the undivided call, what the mesh axes do in it, and where its tensors are to lie."""

    sizes: Sizes
    roles: Roles
    operands: dict[str, Sharding]  # query, key, value
    out: Sharding
    stats: Sharding
    slots: Sharding  # the statistics of the contract's ops
    seed: Sharding
    nothing: Sharding  # gradients that there are none of


def sharding_of(roles: Roles, axes: TensorAxes, shape: Sequence[int], dtype: torch.dtype) -> Sharding:
    """Where a tensor with these axes lies."""
    return Sharding(roles.mesh, roles.placements(axes), roles.gradient_placements(axes), tuple(shape), dtype)


def arrange(query: DTensor, key: DTensor, value: DTensor, layout: str, num_heads: int | None) -> Arrangement:
    """The arrangement for three tensors on one mesh. ValueError where their shapes do not fit together.

    The last 1024 are remembered by what the three tensors were made with.
    """
    # dynamo would ignore a cache, with a warning; sizes that are symbols have no hash.
    if torch.compiler.is_compiling() or not (type(query.numel()) is type(key.numel()) is type(value.numel()) is int):
        operands = [(tensor.placements, tensor.shape, tensor.dtype) for tensor in (query, key, value)]
        return _arrange(operands, query.device_mesh, layout, num_heads)
    spec = spec_in(query)
    return _remembered(id(spec.mesh), spec, spec_in(key), spec_in(value), layout, num_heads)


OperandMeta = tuple[tuple[Placement, ...], Sequence[int], torch.dtype]


def _arrange(operands: Sequence[OperandMeta], mesh: DeviceMesh, layout: str, num_heads: int | None) -> Arrangement:
    query_shape, key_shape, value_shape = (shape for _, shape, _ in operands)
    sizes = read_sizes(query_shape, key_shape, value_shape, layout, num_heads)
    roles = choose_roles(mesh, [placements for placements, _, _ in operands], sizes, layout)
    axes = axes_of_layout(layout)
    shardings = [sharding_of(roles, axes, shape, dtype) for _, shape, dtype in operands]
    query = shardings[0]
    rows, axes_of_rows = stats_shape(sizes, layout), axes_of_stats(layout)
    return Arrangement(
        sizes,
        roles,
        dict(zip(OPERANDS, shardings, strict=True)),
        sharding_of(roles, axes, out_shape(query.shape, sizes, layout), query.dtype),
        sharding_of(roles, axes_of_rows, rows, torch.float64 if query.dtype == torch.float64 else torch.float32),
        sharding_of(roles, axes_of_rows, [*rows, STAT_SLOTS], torch.float32),
        sharding_of(roles, {}, [1], torch.int64),
        sharding_of(roles, {}, [0], query.dtype),
    )


# Typed, because True is no number of heads though it equals one. By the identity of the mesh, which the query's spec
# keeps alive, because meshes that compare equal may have different groups.
@functools.lru_cache(maxsize=1024, typed=True)
def _remembered(mesh_id: int, query: Any, key: Any, value: Any, layout: str, num_heads: int | None) -> Arrangement:
    operands = [(spec.placements, spec.tensor_meta.shape, spec.tensor_meta.dtype) for spec in (query, key, value)]
    return _arrange(operands, query.mesh, layout, num_heads)

"""Private names of PyTorch that this package uses; docs/dtensor.md lists also those it finds in PyTorch's own modules.

Tested on 2.13.0 at every change, and tried on 2.12.1 and 2.14.1 (docs/dtensor.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def allows_implicit_replication() -> bool:
    """Whether plain tensors beside DTensors count as replicated."""
    return DTensor._op_dispatcher._allow_implicit_replication


def allow_implicit_replication(allowed: bool) -> None:
    """Says so from now on. The public context manager does not restore what was before."""
    DTensor._op_dispatcher._allow_implicit_replication = allowed


def spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """What a contiguous DTensor of this shape is made with."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype))


def spec_in(tensor: DTensor) -> DTensorSpec:
    """What it was made with: mesh, placements, shape, strides and dtype. Hashable where all sizes are numbers."""
    return tensor._spec


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a dense tensor."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    return tuple(strides)


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """`DTensor.from_local` without autograd and checks, at a fortieth of the cost.

    Without `__init__`, as PyTorch's dispatcher does it: that one serves torch.export alone, where `from_local` is used.
    `local` must have no history of autograd.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def local_of(tensor: DTensor) -> torch.Tensor:
    """`to_local()` without autograd."""
    return tensor._local_tensor


def context_parallel_module() -> Any:
    """The module of PyTorch's own context parallelism."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def context_parallel_rules() -> Any:
    """The module with its sharding rules for flash, efficient and cudnn attention."""
    from torch.distributed.tensor.experimental._context_parallel import _sharding_rules

    return _sharding_rules


def composite_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """PyTorch's own scaled_dot_product_attention, whatever kernels were put in front of it."""
    return torch.ops.aten.scaled_dot_product_attention.default.decompose(*args, **kwargs)


def is_inside_context_parallel() -> bool:
    """Whether PyTorch's `context_parallel` context manager is open: then it has replaced SDPA."""
    return F.scaled_dot_product_attention in context_parallel_module()._replaced_functions


def restore_later(function: Any, original: Any) -> None:
    """When the open `context_parallel` puts `function` back, it puts `original` back instead."""
    replaced = context_parallel_module()._replaced_functions
    for wrapper, (name, target) in replaced.items():
        if target is function:
            replaced[wrapper] = (name, original)


def is_tracing() -> bool:
    """Whether PyTorch traces a graph now, at any of its stages."""
    return torch._guards.TracingContext.try_get() is not None

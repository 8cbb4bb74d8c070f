"""Every private name of PyTorch that this package uses, and nothing else uses any.

Checked by the tests on 2.13.0. docs/dtensor.md says what came of trying others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


def allows_implicit_replication() -> bool:
    """Whether plain tensors beside DTensors count as replicated."""
    return DTensor._op_dispatcher._allow_implicit_replication


def allow_implicit_replication(allowed: bool) -> None:
    """Says so from now on. The public context manager does not restore what was before."""
    DTensor._op_dispatcher._allow_implicit_replication = allowed


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

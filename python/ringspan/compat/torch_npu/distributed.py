"""`torch_npu.distributed...` by the names of context parallelism, and the backend "hccl"."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

import ringspan
from ringspan.compat.torch_npu.undo import set_attribute, set_item

PACKAGE = "torch_npu.distributed.tensor.experimental"
SHARED = (
    "_CausalBehavior",
    "_ContextParallel",
    "_context_parallel_shard",
    "_cp_options",
    "_disable_context_parallel_dispatcher",
    "_enable_context_parallel_dispatcher",
    "_is_causal_behavior",
    "_RotateMethod",
    "context_parallel",
    "context_parallel_unshard",
    "set_rotate_method",
)
BALANCERS = ("_HeadTailLoadBalancer", "_LoadBalancer", "_PerDocumentHeadTailLoadBalancer")


def npu_enable_cp_dtensor_dispatcher() -> None:
    """Makes the contract's ops and PyTorch's attention run over the ranks of a mesh when they are given DTensors."""
    ringspan.enable_cp_dtensor_dispatcher()


def npu_disable_cp_dtensor_dispatcher() -> None:
    """Puts back what was there before."""
    ringspan.disable_cp_dtensor_dispatcher()


def distributed_modules() -> dict[str, dict[str, Any]]:
    """What the modules hold, by their full names."""
    from torch.distributed.tensor.experimental import _context_parallel as shared

    switches = {
        "npu_enable_cp_dtensor_dispatcher": npu_enable_cp_dtensor_dispatcher,
        "npu_disable_cp_dtensor_dispatcher": npu_disable_cp_dtensor_dispatcher,
    }
    names = {name: getattr(shared, name) for name in (*SHARED, *BALANCERS)}
    return {
        "torch_npu.distributed": {},
        "torch_npu.distributed.tensor": {},
        PACKAGE: {"context_parallel": shared.context_parallel},
        f"{PACKAGE}._context_parallel": names,
        f"{PACKAGE}._context_parallel._attention": {name: names[name] for name in SHARED} | switches,
        f"{PACKAGE}._context_parallel._npu_attention": switches,
    }


def install_switches(stack: ExitStack) -> None:
    """PyTorch's own context parallelism switches our dispatcher on and off."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    from ringspan.dtensor.dispatcher import ContextParallelWatch

    stack.callback(ContextParallelWatch().remove)
    set_attribute(stack, _attention, "_enable_cp_dtensor_dispatcher", npu_enable_cp_dtensor_dispatcher)
    set_attribute(stack, _attention, "_disable_cp_dtensor_dispatcher", npu_disable_cp_dtensor_dispatcher)


def install_hccl(stack: ExitStack) -> None:
    """`init_process_group("hccl")` makes a gloo group. PyTorch keeps its default backend for CPU tensors."""
    backend = dist.Backend
    set_attribute(stack, backend, "HCCL", "hccl")
    for mapping, key in ((backend.backend_capability, "hccl"), (backend.backend_type_map, "hccl"),
                         (backend._plugins, "HCCL")):  # fmt: skip
        set_item(stack, mapping, key, None)
    backend.backend_list.append("hccl")
    stack.callback(backend.backend_list.remove, "hccl")
    backend.register_backend("hccl", dist.ProcessGroupGloo, devices=["cpu"])

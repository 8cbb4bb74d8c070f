"""`install` and `uninstall`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from contextlib import ExitStack
from types import ModuleType

import torch
from torch import Tensor

from ringspan.compat.torch_npu.distributed import distributed_modules, install_hccl, install_switches
from ringspan.compat.torch_npu.generator import Generator, join_torch
from ringspan.compat.torch_npu.npu_module import install_npu_module, make_npu_module
from ringspan.compat.torch_npu.ops import VendorOps
from ringspan.compat.torch_npu.strings import install_strings
from ringspan.compat.torch_npu.testing import testing_modules
from ringspan.compat.torch_npu.undo import set_item
from ringspan.device import NpuSteps, npu_refusal, serve

NAME = "torch_npu"


_UNDO: list[ExitStack] = []  # what is in force in this process, where there is an installation


def install(*, device_strings: bool = True, context_parallel: bool = True) -> bool:
    """Makes `import torch_npu` give the stand-in, in this process. False where the real one is there, and left alone.

    device_strings: "npu" names the CPU in this thread. Costs a Python call for each PyTorch function.
    context_parallel: PyTorch's context parallelism switches our dispatcher instead of its own.
    A second call changes nothing.
    """
    if _UNDO:
        return True
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return False
    with ExitStack() as stack:
        _install(stack, device_strings, context_parallel)
        _UNDO.append(stack.pop_all())
    return True


def uninstall() -> None:
    """Leaves everything as `install` found it. Without an installation nothing happens."""
    if _UNDO:
        _UNDO.pop().close()


def is_installed() -> bool:
    """Whether the stand-in is in force."""
    return bool(_UNDO)


def _install(stack: ExitStack, device_strings: bool, context_parallel: bool) -> None:
    generator = Generator()
    ops = VendorOps(generator)
    stack.callback(ops.close)
    npu = make_npu_module(generator)
    root = ops.packets() | {"npu": npu, "__version__": f"{torch.__version__}.ringspan"}
    modules = {f"{NAME}.npu": npu}
    for name, content in ({NAME: root} | distributed_modules() | testing_modules()).items():
        # No file stands behind them; they count as packages, so that others can be imported from below them.
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content, __path__=[])
    for name, module in modules.items():
        # Others ask for it before they import.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        set_item(stack, sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    set_item(stack, sys.modules, "torch.npu", npu)
    install_npu_module(stack, npu)
    join_torch(stack, generator)
    install_hccl(stack)
    # Calls of several ranks take the way of an NPU: whoever replaces `npu_ring_attention_update` sees them.
    # What a step cannot do (dropout, masks as tensors, fp64) and calls of one rank run on this library's kernels.
    stack.callback(serve("CPU", NpuSteps(), _refusal).close)
    if context_parallel:
        install_switches(stack)
    if device_strings:
        install_strings(stack)


def _refusal(query: Tensor, sizes: list[int], given: list[str]) -> str:
    return "one rank has no steps" if sizes[0] == 1 else npu_refusal(query, sizes, given)

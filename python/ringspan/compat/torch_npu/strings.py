"""Device strings: "npu" and "npu:0" mean the CPU in whatever PyTorch function they are given to."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ringspan.compat.torch_npu.undo import set_attribute


def on_cpu(value: Any) -> Any:
    """ "cpu" for an NPU's name, anything else as it is."""
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "npu" else value


class NpuStringsAreCpu(TorchFunctionMode):
    """Rewrites arguments before PyTorch parses them. Costs a Python call for each PyTorch function."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls `func` with names of the CPU."""
        named = {name: on_cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.to:
            args = tuple(on_cpu(value) for value in args)
        return func(*args, **named)


def install_strings(stack: ExitStack) -> None:
    """Enters the mode in this thread, and makes `Module.to` read the names as well."""
    mode = NpuStringsAreCpu()
    mode.__enter__()
    stack.callback(_leave, mode)
    module_to = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return module_to(self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    set_attribute(stack, torch.nn.Module, "to", to)


def _leave(mode: TorchFunctionMode) -> None:
    """Takes `mode` off the stack of modes, wherever it lies by now."""
    from torch.overrides import _pop_mode, _push_mode

    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _push_mode(one)

"""`torch.npu`: as much of the device module as programs ask before they compute, for a device that is the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringspan.compat.torch_npu.generator import Generator
from ringspan.compat.torch_npu.graph import NPUGraph, graph
from ringspan.compat.torch_npu.undo import set_attribute

DEVICE_NAME = "Ascend910B2"
COUNT_VARIABLE = "RINGSPAN_NPU_DEVICES"  # how many devices the machine pretends to have
_COUNT = 2


class Devices:
    """The number of devices and the one that was chosen last. All of them are this CPU."""

    def __init__(self) -> None:
        self.current = 0

    def count(self) -> int:
        """From the environment variable RINGSPAN_NPU_DEVICES, else 2."""
        return int(os.environ.get(COUNT_VARIABLE, _COUNT))

    def choose(self, device: Any) -> None:
        """Chooses a device by number, "npu:1" or torch.device. RuntimeError where there are fewer."""
        index = index_of(device)
        if not 0 <= index < self.count():
            raise RuntimeError(f"npu device {index} was asked for; {COUNT_VARIABLE} says that there are {self.count()}")
        self.current = index

    @contextmanager
    def chosen(self, device: Any) -> Iterator[None]:
        """Chooses a device for a block."""
        before = self.current
        self.choose(device)
        try:
            yield
        finally:
            self.current = before


def index_of(device: Any) -> int:
    """The number in 1, "npu:1" or a device object."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        return int(device.partition(":")[2] or 0)
    return device.index or 0


def make_npu_module(generator: Generator) -> ModuleType:
    """The module that becomes `torch.npu` and `torch_npu.npu`."""
    module, devices = ModuleType("torch.npu"), Devices()

    def manual_seed(seed: int) -> None:
        generator.manual_seed(seed)

    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        device_count=devices.count,
        current_device=lambda: devices.current,
        set_device=devices.choose,
        device=devices.chosen,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        get_device_name=lambda device=None: DEVICE_NAME,
        get_device_capability=lambda device=None: None,
        is_bf16_supported=lambda: True,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        initial_seed=generator.initial_seed,
        get_rng_state=lambda device="npu": generator.get_state(),
        set_rng_state=lambda new_state, device="npu": generator.set_state(new_state),
        set_compile_mode=lambda jit_compile=False: None,
        default_generators=(generator,),
        NPUGraph=NPUGraph,
        graph=graph,
    )
    return module


def install_npu_module(stack: ExitStack, module: ModuleType) -> None:
    """Puts the module into `torch`, and `npu()` on tensors and modules, where it moves nothing."""
    set_attribute(stack, torch, "npu", module)
    set_attribute(stack, Tensor, "npu", lambda self, device=None, non_blocking=False: self)
    set_attribute(stack, torch.nn.Module, "npu", lambda self, device=None: self)

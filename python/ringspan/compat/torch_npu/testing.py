"""`torch_npu.testing`: what tests of torch_npu import before they test anything."""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringspan.compat.torch_npu.npu_module import COUNT_VARIABLE, DEVICE_NAME

WORLD_VARIABLE = "RINGSPAN_NPU_WORLD_SIZE"  # ranks of a distributed test
_WORLD = 2


class TestCase(unittest.TestCase):
    """unittest's, with comparisons of tensors."""

    def assertRtolEqual(self, x: Any, y: Any, prec: float = 1e-4, prec16: float = 1e-3, auto_trans_dtype: bool = False,
                        message: str | None = None) -> None:  # fmt: skip
        """Every element within `prec` of the other, relative to it where that is above 1, else absolutely.

        16-bit types take `prec16`. Stricter than torch_npu's, which lets a share of the elements be further apart.
        """
        plain = (value.detach().double().numpy() if isinstance(value, torch.Tensor) else value for value in (x, y))
        one, other = map(np.asarray, plain)
        half = any(getattr(value, "dtype", None) in (torch.float16, torch.bfloat16, np.float16) for value in (x, y))
        np.testing.assert_allclose(
            one, other, rtol=prec16 if half else prec, atol=prec16 if half else prec, err_msg=message or ""
        )

    def assertEqual(self, first: Any, second: Any, msg: str | None = None, **limits: Any) -> None:
        """Of tensors by `torch.testing.assert_close`, with `atol` and `rtol`."""
        if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
            torch.testing.assert_close(first, second, msg=msg, **limits)
        else:
            super().assertEqual(first, second, msg)  # noqa: PT009  this is unittest


def supported_devices(names: list[str]) -> Callable[..., Any]:
    """Decorator: skips a test that is for other devices than the one that is imitated."""
    is_supported = any(DEVICE_NAME.startswith(name) for name in names)
    return unittest.skipUnless(is_supported, f"for {names}, this is {DEVICE_NAME}")


def skip_if_unsupport_multi_npu(count: int) -> Callable[..., Any]:
    """Decorator: skips a test that needs more devices than there are."""
    return unittest.skipIf(
        int(os.environ.get(COUNT_VARIABLE, count)) < count, f"{count} devices wanted, {COUNT_VARIABLE} has fewer"
    )


def with_comms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a method: a process group of all ranks lives while it runs."""

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.init_pg(*([] if not hasattr(self, "backend") else [self.backend]))
        try:
            return function(self, *args, **kwargs)
        finally:
            self.destroy_pg()

    return run


def world_size() -> int:
    """Of distributed tests: the environment variable RINGSPAN_NPU_WORLD_SIZE, else 2."""
    return int(os.environ.get(WORLD_VARIABLE, _WORLD))


def testing_modules() -> dict[str, dict[str, Any]]:
    """What the modules hold, by their full names. PyTorch's bases of distributed tests are imported when asked for."""
    return {
        "torch_npu.testing": {},
        "torch_npu.testing.testcase": {"TestCase": TestCase, "run_tests": unittest.main},
        "torch_npu.testing.common_utils": {"SupportedDevices": supported_devices},
        "torch_npu.testing.common_distributed": {
            "with_comms": with_comms,
            "skipIfUnsupportMultiNPU": skip_if_unsupport_multi_npu,
        },
        "torch_npu.testing._internal": {},
        "torch_npu.testing._internal.common_dtensor": {"__getattr__": _dtensor_base},
    }


def _dtensor_base(name: str) -> Any:
    if name != "NPUDTensorTestBase":
        raise AttributeError(f"torch_npu.testing._internal.common_dtensor has no {name}")
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase

    class NPUDTensorTestBase(DTensorTestBase):
        """PyTorch's base of distributed tests, on CPU tensors and gloo."""

        device_type = "cpu"

        @property
        def world_size(self) -> int:
            """Ranks."""
            return world_size()

        @property
        def backend(self) -> str:
            """Of the process group."""
            return "gloo"

        def destroy_pg(self, device_id: int | None = None) -> None:
            """Ends the process group."""
            dist.barrier()
            dist.destroy_process_group()

    return NPUDTensorTestBase

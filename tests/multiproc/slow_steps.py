"""Steps of attention that take their time: a rank stays in the midst of an exchange for as long as a test needs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import standins

from ringspan import device


class _Slow(device.NpuSteps):
    def __init__(self, pauses: Sequence[float]) -> None:
        self._pauses = list(pauses)

    def _pause(self) -> None:
        if self._pauses:
            time.sleep(self._pauses.pop(0))

    def forward(self, *tensors: Any) -> None:
        self._pause()
        super().forward(*tensors)

    def backward(self, *tensors: Any) -> None:
        self._pause()
        super().backward(*tensors)


@contextlib.contextmanager
def slow_steps(pauses: Sequence[float]) -> Iterator[None]:
    """While this lasts, the n-th step of this process sleeps pauses[n] seconds and those after them do not.

    Of calls on fp32 tensors, whose steps a stand-in for an accelerator computes. With no pauses nothing changes.
    """
    if not pauses:
        yield
        return
    ops = standins.Npu()
    registration = device.serve("CPU", _Slow(pauses), device.npu_refusal)
    try:
        yield
    finally:
        registration.close()
        ops.close()

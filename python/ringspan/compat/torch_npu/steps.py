"""Groups: with the stand-in, calls over several ranks run step by step over the functions of `torch_npu`.

So they take the way that they take on NPUs, and whoever replaces `torch_npu.npu_ring_attention_update` sees its calls.
What a step cannot do (dropout, masks as tensors, fp64) and calls of one rank run on this library's kernels.
"""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor

from ringspan.device import NpuSteps, npu_refusal, serve


def install_steps(stack: ExitStack) -> None:
    """Puts the steps of an NPU in force for CPU tensors."""
    stack.callback(serve("CPU", NpuSteps(), _refusal).close)


def _refusal(query: Tensor, sizes: list[int], given: list[str]) -> str:
    return "one rank has no steps" if sizes[0] == 1 else npu_refusal(query, sizes, given)

"""`serve`: makes step kernels the ones of a dispatch key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

# (query, [ranks, query heads, KV heads, head dim of q and k, head dim of v], names of what else is given) -> the reason
# why the steps cannot do the call, "" = they can.
StepRefusal = Callable[[Tensor, list[int], list[str]], str]


class Steps(Protocol):
    """What an accelerator offers. Tensors [B, N, S, D]; state and gradients fp32; tiles int64 [n, 11] on the CPU."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, scale: float, out: Tensor, row_max: Tensor,
        row_sum: Tensor,
    ) -> None:  # fmt: skip
        """Adds the tiles' attention to the state (out, row_max, row_sum), in place."""

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, tiles: Tensor,
        scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """Adds the tiles' gradients to dq, dk and dv, in place."""


class Registration:
    """Kernels that are in force until `close`."""

    def __init__(self, key: str, steps: Steps, refusal: StepRefusal) -> None:
        self._library = torch.library.Library("ringspan", "IMPL")
        # Called below autograd; an op that is composite must not start it again.
        self._library.impl("_step_forward", torch.no_grad()(steps.forward), key)
        self._library.impl("_step_backward", torch.no_grad()(steps.backward), key)
        self._library.impl("_step_refusal", refusal, key)

    def close(self) -> None:
        """Takes the kernels away."""
        self._library._destroy()


def serve(key: str, steps: Steps, refusal: StepRefusal) -> Registration:
    """Makes `steps` run the calls on tensors of a dispatch key such as "CUDA". RuntimeError where the key has kernels.

    On the key "CPU", calls that `refusal` refuses are run by this library's own kernels.
    """
    return Registration(key, steps, refusal)

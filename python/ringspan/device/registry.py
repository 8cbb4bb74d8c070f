"""What an accelerator offers, and `serve`: makes it the one that runs the steps of a dispatch key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringspan.device.rows import Partial, Place, merge

# (query, [ranks, query heads, KV heads, head dim of q and k, head dim of v], names of what else is given) -> the reason
# why the steps cannot do the call, "" = they can.
StepRefusal = Callable[[Tensor, list[int], list[str]], str]


class Steps:
    """The kernels of `ringspan::_step_forward` and `_step_backward`, by calls of an accelerator's own ops.

    Tensors [B, N, S, D]; state and gradients fp32; tiles int64 [n, 11] on the CPU.
    """

    def calls(self, tiles: Tensor, query: Tensor, value: Tensor) -> Iterator[tuple[Place, Any]]:
        """The calls that the tiles of a step need: the place of each, and what `attend` has to know besides."""
        raise NotImplementedError

    def attend(self, call: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """Attention of a call's rows over its columns."""
        raise NotImplementedError

    def differentiate(self, call: Any, rows: list[Tensor], k: Tensor, v: Tensor, scale: float) -> Sequence[Tensor]:
        """Gradients of q, k and v. rows: grad_out, q, out and lse; the last two are those of whole rows."""
        raise NotImplementedError

    merge = staticmethod(merge)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, scale: float, out: Tensor, row_max: Tensor,
        row_sum: Tensor,
    ) -> None:  # fmt: skip
        """Adds the tiles' attention to the state (out, row_max, row_sum), in place."""
        for place, call in self.calls(tiles, query, value):
            part = self.attend(call, place.rows(query), place.columns(key), place.columns(value), scale)
            place.join(part, Partial(out, row_max, row_sum), self.merge)

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, tiles: Tensor,
        scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """Adds the tiles' gradients to dq, dk and dv, in place. out and lse are those of whole rows."""
        for place, call in self.calls(tiles, query, value):
            rows = [place.rows(tensor) for tensor in (grad_out, query, out, lse)]
            found = self.differentiate(call, rows, place.columns(key), place.columns(value), scale)
            place.add_gradients(found, dq, dk, dv)


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

"""PyTorch's own ring attention, driven with its attention for CPUs (by itself it calls kernels of other devices)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel

_aten = torch.ops.aten
_SEQ_DIM = 2


class PytorchRing:
    """Rows of causal problems are split head-tail, PyTorch's load balancing; K and V travel by all_to_all, which is
    the faster of its two ways on gloo."""

    def __init__(self, group: dist.ProcessGroup, causal: bool) -> None:
        self.group, self.causal = group, causal

    def _configure(self) -> None:
        options = context_parallel._cp_options
        options.enable_load_balance = self.causal
        options.rotate_method = context_parallel._RotateMethod.ALL_TO_ALL

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's output and log-sum-exp."""
        self._configure()
        out, lse = context_parallel._templated_ring_attention(
            self.group, _SEQ_DIM, _forward, query, key, value, is_causal=self.causal
        )
        return out, lse

    def forward_backward(self, qkv: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
        """This rank's output and gradients of query, key and value."""
        out, lse = self.forward(*qkv)
        query, key, value = qkv
        grads = context_parallel._templated_ring_attention_backward(
            self.group,
            _SEQ_DIM,
            _backward,
            grad_out=dout,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=lse,
            is_causal=self.causal,
        )
        return out, *grads[:3]


def _forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **_: Any) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    **_: Any,
) -> tuple[Tensor, ...]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )

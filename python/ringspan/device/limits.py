"""What the steps of each accelerator cannot do. The named arguments are in ringspan/support.py, sizes here."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.support import device_refusal

_NPU_HEADS = 256
_CUDA_HEAD_DIM_STEP = 8
_CUDA_CAPABILITY = (8, 0)  # the oldest with bf16 and flash attention


def npu_refusal(query: Tensor, sizes: list[int], given: list[str]) -> str:
    """The limits of the fused-attention contract (docs/npu_ops.md); "" where a call is within them."""
    _, q_heads, _, qk_dim, v_dim = sizes
    refusal = device_refusal("npu", (*given, _name_of(query.dtype)))
    if refusal:
        return refusal
    if v_dim > qk_dim:
        return f"value has head dim {v_dim}, query {qk_dim}; on an NPU value's must not be larger"
    if q_heads > _NPU_HEADS:
        return f"query has {q_heads} heads; on an NPU give at most {_NPU_HEADS}"
    return ""


def cuda_refusal(query: Tensor, sizes: list[int], given: list[str]) -> str:
    """The limits of PyTorch's own attention ops; "" where a call is within them."""
    refusal = device_refusal("cuda", (*given, _name_of(query.dtype)))
    if refusal:
        return refusal
    for name, dim in (("query and key", sizes[3]), ("value", sizes[4])):
        if dim % _CUDA_HEAD_DIM_STEP:
            return f"the head dim of {name} is {dim}; on a GPU give a multiple of {_CUDA_HEAD_DIM_STEP}"
    if query.device.type != "cuda":
        return ""
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, whose attention ops were never tried; move the tensors to the CPU"
    found = torch.cuda.get_device_capability(query.device)
    if found < _CUDA_CAPABILITY:
        return f"{query.device} has compute capability {found}; at least {_CUDA_CAPABILITY} is needed"
    return ""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""A small Flux transformer of diffusers under its ring and its Ulysses attention, on CPU.

torchrun --standalone --nproc_per_node 2 examples/clients/diffusers_flux.py
"""

from __future__ import annotations

import sys
from unittest import mock

import torch
import torch.distributed as dist
from common import Results, run_client
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from torch import Tensor

TEXT, IMAGE = 16, 48  # tokens
DEGREES = {"ring": "ring_degree", "Ulysses": "ulysses_degree"}


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> tuple[Tensor | int, ...]:
    """aten::_scaled_dot_product_flash_attention: output, log-sum-exp, and seven results that CPU has no use for."""
    if dropout_p or is_causal:
        raise NotImplementedError(f"full attention without dropout only, not dropout_p={dropout_p}, causal={is_causal}")
    out, row_max, row_sum, *_ = torch.ops.ringspan.fusion_attention_v3(
        query, key, value, query.shape[1], "BNSD", scale=query.shape[-1] ** -0.5 if scale is None else scale
    )
    none = query.new_empty(0)
    lse = (row_max + row_sum.log())[..., 0]  # eight equal columns
    return out, lse, none, none, query.shape[2], key.shape[2], none.long(), none.long(), none


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *unused: object,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Its backward. `out` and `lse` may be those of more keys than are here: a ring calls it once for each shard."""
    statistics = lse[..., None].expand(*lse.shape, 8).contiguous()
    return torch.ops.ringspan.fusion_attention_grad_v3(
        query, key, value, grad_out, query.shape[1], "BNSD", attention_in=out,
        softmax_max=statistics, softmax_sum=torch.ones_like(statistics),
        scale_value=query.shape[-1] ** -0.5 if scale is None else scale,
    )[:3]  # fmt: skip


# The backend `_native_flash` calls two ops of aten that PyTorch has no CPU kernel for.
library = torch.library.Library("aten", "IMPL")
library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")


def make_model() -> FluxTransformer2DModel:
    """One block of each kind, the same in every process."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def make_inputs() -> dict[str, Tensor]:
    """Two images with their texts."""
    source = torch.Generator().manual_seed(1)
    places = torch.zeros(IMAGE, 3)
    places[:, 1], places[:, 2] = torch.arange(IMAGE) // 8, torch.arange(IMAGE) % 8
    return {
        "hidden_states": torch.randn(2, IMAGE, 8, generator=source),
        "encoder_hidden_states": torch.randn(2, TEXT, 32, generator=source),
        "pooled_projections": torch.randn(2, 32, generator=source),
        "timestep": torch.tensor([0.3, 0.8]),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def train(world: int) -> Results:
    """Outputs and gradients, for each kind of attention."""
    if world > 1:
        dist.init_process_group("gloo")
    results: Results = {}
    for kind, degree in DEGREES.items():
        model = make_model()
        if world > 1:
            model.set_attention_backend("_native_flash")
            # It takes the rank modulo the number of accelerators, of which CPU builds count 0.
            with mock.patch("torch.accelerator.device_count", return_value=1):
                model.enable_parallelism(config=ContextParallelConfig(**{degree: world}))
        out = model(**make_inputs(), return_dict=False)[0]
        out.square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if world > 1:
            for gradient in gradients:
                dist.all_reduce(gradient)  # each rank has the part of its own tokens
        results |= {f"{kind}: output": [out.detach().clone()], f"{kind}: gradients": gradients}
    return results


if __name__ == "__main__":
    sys.exit(run_client("diffusers Flux, ring and Ulysses", __file__, train))

"""torchtitan's llama3 debug model with SDPA under its context parallelism and FSDP2, on CPU.

torchrun --standalone --nproc_per_node 2 examples/clients/torchtitan_llama3.py
"""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from common import Results, run_client, whole
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

# Its kernels for expert parallelism, which this model has none of, import triton, which CPU builds of torch lack.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

import torchtitan.tools.utils  # noqa: E402

# Without a GPU torchtitan takes "cuda" for the device type; its modules copy the name when they are imported.
torchtitan.tools.utils.device_type = "cpu"

from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.context_parallel import prepare_context_parallel_input  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import Llama3Model, model_registry  # noqa: E402

STEPS, LENGTH = 3, 128


def make_model(parallelism: ParallelismConfig) -> tuple[Llama3Model, ParallelDims | None]:
    """torchtitan's model, parallelized by torchtitan; the same weights in every process."""
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states()
    if parallelism.context_parallel_degree == 1:
        return model, None

    dist.init_process_group("gloo")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=LENGTH, mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo lacks the reduction that scales and adds up in one.
            module.set_force_sum_reduction_for_comms(True)
    return model, dims


def train(world: int) -> Results:
    """A few steps. Losses are added up over ranks, gradients by FSDP, which torchtitan tells not to divide."""
    # SDPA under context parallelism belongs to the older one of torchtitan's ways with DTensor.
    parallelism = ParallelismConfig(context_parallel_degree=world, spmd_backend="partial_dtensor")
    set_spmd_backend(parallelism.spmd_backend)
    model, dims = make_model(parallelism)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    source = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        text = torch.randint(model.config.vocab_size, (2, LENGTH + 1), generator=source)
        tokens, labels, extra = text[:, :-1], text[:, 1:], {"positions": torch.arange(LENGTH).expand(2, -1)}
        count = labels.numel()
        if dims:
            tokens, labels, extra = prepare_context_parallel_input(
                tokens, labels, extra, dims.get_mesh("cp"), tokens.device, parallelism.context_parallel_load_balancer
            )
        loss = cross_entropy_loss(model(tokens, **extra), labels) / count
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            gradients = [whole(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        losses.append(loss.detach())
        if dims:
            dist.all_reduce(losses[-1])
    return {
        "loss of each step": losses,
        "gradients, first step": gradients,
        "weights in the end": [whole(parameter) for parameter in model.parameters()],
    }


if __name__ == "__main__":
    sys.exit(run_client("torchtitan llama3 debugmodel, SDPA, cp=2, FSDP2", __file__, train))

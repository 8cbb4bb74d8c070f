"""The Trainer of transformers with accelerate's context parallelism and FSDP2, on CPU.

torchrun --standalone --nproc_per_node 2 examples/clients/accelerate_trainer.py
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from common import Results, run_client, whole
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS, LENGTH, VOCABULARY = 4, 64, 128


def make_model() -> LlamaForCausalLM:
    """A small one with two query heads for each KV head, the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def make_texts() -> list[dict[str, Tensor]]:
    """Two sequences for each step, which count from a random token on."""
    starts = torch.randint(VOCABULARY, (2 * STEPS, 1), generator=torch.Generator().manual_seed(1))
    ids = (starts + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


class Record(TrainerCallback):
    """Keeps the loss of each step and the gradients of the first, before they are clipped."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self.gradients = self.gradients or [whole(parameter.grad) for parameter in model.parameters()]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self.losses += [torch.tensor(logs["loss"])] if "loss" in logs else []


def train(world: int) -> Results:
    """A run of the Trainer."""
    parallel = world > 1
    record = Record()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            train_sampling_strategy="sequential",
            optim="sgd",
            learning_rate=0.3,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            parallelism_config=ParallelismConfig(cp_size=world) if parallel else None,
            fsdp=parallel,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if parallel else None,
        )
        if parallel:
            # accelerate offers FSDP for every kind of device but CPU. Device (cpu) and backend (gloo) stay as they are.
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
        trainer = Trainer(make_model(), arguments, train_dataset=make_texts(), callbacks=[record])
        trainer.train()
    weights = [whole(parameter) for parameter in trainer.model.parameters()]
    return {
        "loss of each step": record.losses,
        "gradients, first step": record.gradients,
        "weights in the end": weights,
    }


if __name__ == "__main__":
    sys.exit(run_client("transformers Trainer, accelerate cp_size=2, FSDP2", __file__, train))

"""Jobs of the pool: two pipeline stages by two context-parallel ranks, several micro-batches in flight."""

from __future__ import annotations

import oracle
import torch
import torch.distributed as dist
from cases import map_of, mask_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from training_jobs import BATCH, Stack, attention_of, gradients_of, mesh_of
from training_model import (
    DIM,
    RATE,
    VOCABULARY,
    Attention,
    Batch,
    Decoder,
    Steps,
    build,
    dense,
    draw,
    one_process,
    token_losses,
    worst_errors,
)

import ringspan as rs

STAGES = 2
Z_WEIGHT = 0.01


class StageOfModel(nn.Module):
    """One block with what stands before or behind it; a pipeline passes hidden states only, so the rest is held."""

    def __init__(self, model: Decoder, stage: int) -> None:
        super().__init__()
        if stage == 0:
            model.head = None
        else:
            model.embedding = None
        del model.blocks[str(1 - stage)]
        self.module = model
        self.positions: Tensor | None = None
        self.attention: Attention | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, self.positions, self.attention)


def _train_step(stack: Stack, batch: Batch, split: tuple, mask: rs.Mask, pp: dist.ProcessGroup) -> float:
    """One schedule of BATCH micro-batches of one sequence each; returns the loss to display, on every rank."""
    smap = map_of(split, batch.tokens.shape[1], stack.cp.size())
    place = stack.cp.get_local_rank()
    tokens, targets, valid = (smap.shard(x, place, 1) for x in (batch.tokens, batch.targets, batch.valid))
    stack.model.positions = smap.positions(place)
    stack.model.attention = attention_of(stack, smap, mask, 0, 0.0)
    displayed = torch.zeros(1, dtype=torch.float64)

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        """Two losses of one micro-batch: of the tokens, and of the size of their logits."""
        values, counts = target[:, 0], target[:, 1].bool()
        total = 0.0
        for losses in (token_losses(logits, values), Z_WEIGHT * logits.logsumexp(-1) ** 2):
            loss, shown = rs.masked_mean_loss(losses, counts, group=stack.loss_group, step_valid=valid.sum())
            total = total + loss
            displayed.add_(shown)
        return total

    index = dist.get_rank(pp)
    hidden = torch.empty(1, tokens.shape[1], DIM, dtype=torch.float64, requires_grad=True)
    logits = hidden.new_empty(1, tokens.shape[1], VOCABULARY)
    shapes = (tokens[:1], hidden) if index == 0 else (hidden, logits)
    # With shapes given the stage runs nothing to find them: no loss is counted that belongs to no micro-batch, and
    # reentrant checkpoints work.
    stage = PipelineStage(stack.model, index, STAGES, torch.device("cpu"), shapes[0], shapes[1], group=pp)
    # The shares of the micro-batches add up to the mean: nothing is to be divided by their number.
    schedule = Schedule1F1B(stage, n_microbatches=BATCH, loss_fn=loss_of, scale_grads=False)
    if index == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=torch.stack([targets, valid.to(targets.dtype)], 1))
    dist.broadcast(displayed, group_src=STAGES - 1, group=pp)
    return float(displayed)


def train(
    _: dist.ProcessGroup, split: tuple, mask: tuple = ("causal",), reentrant: bool | None = None
) -> dict[str, float]:
    """Errors of this rank's stage after two steps of two lengths."""
    mesh = mesh_of("pp", "cp")
    pp = mesh["pp"].get_group()
    model = StageOfModel(build(reentrant), dist.get_rank(pp))
    stack = Stack(model, mesh["cp"], mesh["cp"], 1, sum_over=mesh["cp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    batches = [draw(seed, BATCH, seq_len) for seed, seq_len in enumerate((13, 10))]
    found: Steps = []
    for batch in batches:
        optimizer.zero_grad()
        shown = _train_step(stack, batch, split, mask_of(mask), pp)
        found.append((shown, gradients_of(stack)))
        optimizer.step()
    right = one_process(batches, lambda *x: dense(oracle.keep_of(mask, *[x[0].shape[2]] * 2))(*x), Z_WEIGHT)
    return worst_errors(found, right)

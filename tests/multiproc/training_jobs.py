"""Jobs of the pool that train over four processes, against one process that attends densely in float64.

A stack is a way to spread a model: what wraps it, which ranks share a sequence, which share the loss, and what is left
to do with the gradients. All of them go through the same loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import torch
import torch.distributed as dist
from cases import map_of, mask_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training_model import (
    HEADS,
    RATE,
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

SEED = 7
BATCH = 4


@dataclass(frozen=True)
class Stack:
    """A model that is spread over the ranks."""

    model: nn.Module
    cp: DeviceMesh  # who shares a sequence
    loss_group: dist.ProcessGroup | DeviceMesh  # who shares the mean
    averaged_by: int  # what the wrapper divides gradients by
    sum_over: DeviceMesh | None = None  # what the loop adds gradients up over
    dp_place: int = 0
    dp_size: int = 1
    tp_place: int = 0
    tp_size: int = 1


@functools.cache
def mesh_of(*names: str) -> DeviceMesh:
    """Four ranks, 2 x 2 or in one row. Once for each process, since every mesh makes groups."""
    return init_device_mesh("cpu", (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)


def only_cp(reentrant: bool | None) -> Stack:
    cp = mesh_of("cp")
    return Stack(build(reentrant), cp, cp, 1, sum_over=cp)


def ddp(reentrant: bool | None) -> Stack:
    mesh = mesh_of("dp", "cp")
    model = DistributedDataParallel(build(reentrant))
    return Stack(model, mesh["cp"], dist.group.WORLD, 4, None, mesh["dp"].get_local_rank(), 2)


def _shard_parameters(model: Decoder, mesh: DeviceMesh) -> Decoder:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp_on_both_axes(reentrant: bool | None) -> Stack:
    """Parameters sharded over cp and copied over dp."""
    mesh = mesh_of("dp", "cp")
    model = _shard_parameters(build(reentrant), mesh)
    return Stack(model, mesh["cp"], dist.group.WORLD, 4, None, mesh["dp"].get_local_rank(), 2)


def fsdp_flattened(reentrant: bool | None) -> Stack:
    """Parameters sharded over all four ranks."""
    mesh = mesh_of("dp", "cp")
    flat = mesh_of("dp_cp")
    model = _shard_parameters(build(reentrant), flat)
    return Stack(model, mesh["cp"], flat, 4, None, mesh["dp"].get_local_rank(), 2)


def fsdp_over_dp(reentrant: bool | None) -> Stack:
    """Parameters sharded over dp; the loop adds gradients up over cp."""
    mesh = mesh_of("dp", "cp")
    model = _shard_parameters(build(reentrant), mesh["dp"])
    return Stack(model, mesh["cp"], dist.group.WORLD, 2, mesh["cp"], mesh["dp"].get_local_rank(), 2)


def _cut_heads(model: Decoder, mesh: DeviceMesh) -> Decoder:
    plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "up")}
    plan |= {name: RowwiseParallel() for name in ("wo", "down")}
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    return model


def tp(reentrant: bool | None) -> Stack:
    mesh = mesh_of("cp", "tp")
    model = _cut_heads(build(reentrant), mesh["tp"])
    return Stack(model, mesh["cp"], mesh["cp"], 1, mesh["cp"], tp_place=mesh["tp"].get_local_rank(), tp_size=2)


def tp_with_fsdp(reentrant: bool | None) -> Stack:
    mesh = mesh_of("cp", "tp")
    model = _shard_parameters(_cut_heads(build(reentrant), mesh["tp"]), mesh["cp"])
    return Stack(model, mesh["cp"], mesh["cp"], 2, tp_place=mesh["tp"].get_local_rank(), tp_size=2)


STACKS: dict[str, Callable[[bool | None], Stack]] = {
    make.__name__: make for make in (only_cp, ddp, fsdp_on_both_axes, fsdp_flattened, fsdp_over_dp, tp, tp_with_fsdp)
}


def attention_of(stack: Stack, smap: rs.ShardMap, mask: rs.Mask, batch_offset: int, dropout_p: float) -> Attention:
    """What the model calls: the heads are those of the tp place, the sequences begin at `batch_offset`."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        return rs.attention(
            q,
            k,
            v,
            mask=mask,
            shard_map=smap,
            group=stack.cp,
            dropout_p=dropout_p,
            seed=SEED,
            offset=layer,
            head_offset=stack.tp_place * q.shape[1],
            total_heads=HEADS,
            batch_offset=batch_offset,
        )

    return attention


def _syncs(model: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Gradients travel with the last micro-batch of a step only."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def _train_step(stack: Stack, batch: Batch, split: tuple, mask: rs.Mask, micro: int, dropout_p: float) -> float:
    """Forward and backward of one step in `micro` micro-batches; returns the loss to display."""
    smap = map_of(split, batch.tokens.shape[1], stack.cp.size())
    place = stack.cp.get_local_rank()
    positions = smap.positions(place)
    held = batch.tokens.shape[0] // stack.dp_size
    mine = [smap.shard(x[stack.dp_place * held :][:held], place, 1) for x in (batch.tokens, batch.targets, batch.valid)]
    step_valid = mine[2].sum() if micro > 1 else None
    displayed = 0.0
    for index, (tokens, targets, valid) in enumerate(zip(*(x.chunk(micro) for x in mine), strict=True)):
        first = stack.dp_place * held + index * held // micro
        with _syncs(stack.model, index == micro - 1):
            logits = stack.model(tokens, positions, attention_of(stack, smap, mask, first, dropout_p))
            loss, shown = rs.masked_mean_loss(
                token_losses(logits, targets),
                valid,
                group=stack.loss_group,
                averaged_by=stack.averaged_by,
                step_valid=step_valid,
            )
            loss.backward()
        displayed += float(shown)
    return displayed


def gradients_of(stack: Stack) -> dict[str, torch.Tensor]:
    """Whole gradients by the names of the plain model, after what the loop has to add up."""
    found = {}
    for name, parameter in stack.model.named_parameters():
        grad = parameter.grad
        if stack.sum_over is not None:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            dist.all_reduce(local, group=stack.sum_over.get_group())
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[name.removeprefix("module.")] = whole.clone()
    return found


@dataclass(frozen=True)
class Loop:
    """One SGD step for each length, over `micro` micro-batches; reentrant: how checkpoints are, None without any."""

    seq_lens: tuple[int, ...] = (13, 10)
    reentrant: bool | None = None
    micro: int = 1
    dropout_p: float = 0.0


def train(
    _: dist.ProcessGroup, stack: str, split: tuple = ("head_tail",), mask: tuple = ("causal",), **steps: Any
) -> dict[str, float]:
    """Errors after the steps of a `Loop`, which `steps` describes by name."""
    loop = Loop(**steps)
    spread = STACKS[stack](loop.reentrant)
    optimizer = torch.optim.SGD(spread.model.parameters(), lr=RATE)
    batches = [draw(seed, BATCH, seq_len) for seed, seq_len in enumerate(loop.seq_lens)]
    found: Steps = []
    for batch in batches:
        optimizer.zero_grad()
        shown = _train_step(spread, batch, split, mask_of(mask), loop.micro, loop.dropout_p)
        found.append((shown, gradients_of(spread)))
        optimizer.step()
    right = one_process(batches, lambda *x: dense(oracle.keep_of(mask, *[x[0].shape[2]] * 2), loop.dropout_p, SEED)(*x))
    return worst_errors(found, right)

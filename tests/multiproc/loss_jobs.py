"""Jobs of the pool about the scale of loss and gradients: one linear layer, attention and a token loss in float64."""

from __future__ import annotations

from dataclasses import dataclass

import oracle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import map_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from user_jobs import place_of

import ringspan as rs

SEQ_LEN, DIM, HEADS, HEAD_DIM = 8, 12, 2, 8
CLASSES = HEADS * HEAD_DIM


@dataclass(frozen=True)
class Problem:
    """Whole sequences: tokens [B, S, DIM], targets and valid [B, S], and the layer's weight."""

    tokens: Tensor
    targets: Tensor
    valid: Tensor
    weight: Tensor


def _problem(valid: list[str]) -> Problem:
    """`valid`: one string of 0 and 1 for each sequence."""
    generator = torch.Generator().manual_seed(18)
    weight = torch.randn(3 * CLASSES, DIM, dtype=torch.float64, generator=generator)
    tokens = torch.randn(len(valid), SEQ_LEN, DIM, dtype=torch.float64, generator=generator)
    targets = torch.randint(CLASSES, (len(valid), SEQ_LEN), generator=generator)
    return Problem(tokens, targets, torch.tensor([[mark == "1" for mark in row] for row in valid]), weight)


def _project(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, N, S, D]"""
    return tuple((x @ weight.T).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4))


def _losses(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2).flatten(2).transpose(1, 2), targets, reduction="none")


def _one_process(problem: Problem) -> tuple[float, Tensor]:
    """Mean over all valid tokens, and the weight's gradient: by NumPy's attention, and the chain rule for the rest."""
    weight = problem.weight.clone().requires_grad_()
    qkv = _project(problem.tokens, weight)
    arrays = [part.detach().numpy() for part in qkv]
    keep = oracle.keep_of(("causal",), SEQ_LEN, SEQ_LEN)
    out = torch.from_numpy(oracle.attend(*arrays, keep).out).requires_grad_()
    mean = _losses(out, problem.targets)[problem.valid].mean()
    (dout,) = torch.autograd.grad(mean, [out])
    right = oracle.attend(*arrays, keep, dout.numpy())
    torch.autograd.backward(qkv, [torch.from_numpy(grad) for grad in (right.dq, right.dk, right.dv)])
    return float(mean), weight.grad


def linear_layer(
    group: dist.ProcessGroup, valid: list[str], split: tuple = ("contiguous",), dp: int = 1, micro: int = 1
) -> dict[str, float]:
    """Relative errors of the displayed loss and of the gradient, and what a mean of the ranks' means would display."""
    rank, world = place_of(group)
    cp = world // dp
    problem = _problem(valid)
    cp_group = group if dp == 1 else init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))["cp"]
    smap = map_of(split, SEQ_LEN, cp)
    held = len(valid) // dp
    first = rank // cp * held
    mine = [smap.shard(x[first : first + held], rank % cp, 1) for x in (problem.tokens, problem.targets, problem.valid)]
    weight = problem.weight.clone().requires_grad_()
    displayed, sums = 0.0, torch.zeros(2, dtype=torch.float64)
    for tokens, targets, counted in zip(*(x.chunk(micro) for x in mine), strict=True):
        out = rs.attention(*_project(tokens, weight), mask=rs.causal(), shard_map=smap, group=cp_group)
        losses = _losses(out, targets)
        step_valid = mine[2].sum() if micro > 1 else None
        loss, shown = rs.masked_mean_loss(losses, counted, group=group, step_valid=step_valid)
        loss.backward()
        displayed += float(shown)
        sums += torch.stack([losses.detach()[counted].sum(), counted.sum().double()])
    dist.all_reduce(weight.grad, group=group)
    mean, grad = _one_process(problem)
    means = sums[:1] / sums[1].clamp(min=1) / world
    dist.all_reduce(means, group=group)
    return {
        "loss": abs(displayed - mean) / mean,
        "gradient": float((weight.grad - grad).abs().max() / grad.abs().max()),
        "mean of means": abs(float(means) - mean) / mean,
    }


def step_of_micro_batches(
    group: dist.ProcessGroup, losses: list[list[list[float]]], averaged_by: int = 1
) -> tuple[list[float], list[list[float]]]:
    """Of `losses` [rank][micro-batch][token], all of them valid: what each call displays, and the tokens' gradients."""
    rank, _ = place_of(group)
    mine = [torch.tensor(one, requires_grad=True) for one in losses[rank]]
    shown = []
    for tokens in mine:
        loss, part = rs.masked_mean_loss(
            tokens,
            torch.ones_like(tokens, dtype=torch.bool),
            group=group,
            averaged_by=averaged_by,
            step_valid=sum(map(len, mine)),
        )
        loss.backward()
        shown.append(float(part))
    return shown, [tokens.grad.tolist() for tokens in mine]


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """What each rank is told of calls that rank 0 makes in another way, or wrongly; a good call follows each."""
    rank, _ = place_of(group)
    tokens, valid = torch.ones(3), torch.tensor([True, True, False])
    odd = {
        "fewer": {"step_valid": 1},
        "averaged_by": {"averaged_by": 3},
        "only here": {"step_valid": 2},
        "float": {"step_valid": 2.0},
        "float tensor": {"step_valid": torch.ones(())},
        "many": {"step_valid": torch.ones(2, dtype=torch.int64)},
    }
    said = {}
    for name, arguments in odd.items():
        usual = {"step_valid": 2} if name == "fewer" else {}
        try:
            rs.masked_mean_loss(tokens, valid, group=group, **(arguments if rank == 0 else usual))
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
        assert float(rs.masked_mean_loss(tokens, valid, group=group, step_valid=torch.tensor([2]))[1]) == 1
    return said

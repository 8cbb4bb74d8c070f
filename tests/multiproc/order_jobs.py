"""Jobs of the pool that run forwards and backwards in several orders: no call may change what another one gives."""

from __future__ import annotations

import gc
from collections.abc import Callable

import oracle
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from user_jobs import place_of

import ringspan as rs

SEQ_LEN, HEADS, KV_HEADS, DIM = 13, 4, 2, 8


class Broken(Exception):
    """What a hook raises in the middle of a backward."""


def _break(_: torch.Tensor) -> None:
    raise Broken


class Call:
    """One attention call of its own inputs in float64, and what dense attention makes of them."""

    def __init__(self, group: dist.ProcessGroup, seed: int, recompute: Callable[[], None] | None = None) -> None:
        rank, world = place_of(group)
        smap = rs.ShardMap.head_tail(SEQ_LEN, world)
        self.rows = smap.positions(rank).numpy()
        q, k, v, dout = oracle.draw(seed, SEQ_LEN, HEADS, KV_HEADS, DIM)
        self.right = oracle.attend(q, k, v, oracle.keep_of(("causal",), SEQ_LEN, SEQ_LEN), dout)
        *self.leaves, self.dout = (smap.shard(torch.from_numpy(x), rank, 2) for x in (q, k, v, dout))
        self.leaves = [leaf.requires_grad_() for leaf in self.leaves]

        def attend(*leaves: torch.Tensor) -> torch.Tensor:
            if recompute is not None:
                recompute()
            return rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group)

        if recompute is None:
            self.out = attend(*self.leaves)
        else:
            self.out = checkpoint(attend, *self.leaves, use_reentrant=False)

    def backward(self, times: int = 1) -> None:
        """As if `times` losses came from the one forward."""
        for left in reversed(range(times)):
            self.out.backward(self.dout, retain_graph=left > 0)

    def error(self, times: int = 1) -> float:
        """Of out and of the gradients, relative."""
        right = [self.right.out, *(times * grad for grad in (self.right.dq, self.right.dk, self.right.dv))]
        found = [self.out.detach(), *(leaf.grad for leaf in self.leaves)]
        return max(
            oracle.error(one.numpy(), whole[:, :, self.rows], whole) for one, whole in zip(found, right, strict=True)
        )


def same_order(group: dist.ProcessGroup) -> list[float]:
    first, second = Call(group, 1), Call(group, 2)
    first.backward()
    second.backward()
    return [first.error(), second.error()]


def reverse_order(group: dist.ProcessGroup) -> list[float]:
    first, second = Call(group, 1), Call(group, 2)
    second.backward()
    first.backward()
    return [first.error(), second.error()]


def one_forward_one_backward(group: dist.ProcessGroup) -> list[float]:
    """The order of a pipeline's first stage."""
    calls = [Call(group, 1), Call(group, 2)]
    for seed in (3, 4):
        calls[-2].backward()
        calls.append(Call(group, seed))
    calls[2].backward()
    calls[3].backward()
    return [call.error() for call in calls]


def forwards_without_backward(group: dist.ProcessGroup) -> list[float]:
    """One that is kept, one that is thrown away, and one without gradients."""
    first, kept, thrown = Call(group, 1), Call(group, 2), Call(group, 3)
    del thrown
    gc.collect()
    with torch.no_grad():
        Call(group, 4)
    last = Call(group, 5)
    last.backward()
    first.backward()
    assert kept.leaves[0].grad is None
    return [first.error(), last.error()]


def two_losses_of_one_forward(group: dist.ProcessGroup) -> list[float]:
    first, second = Call(group, 1), Call(group, 2)
    first.backward(times=2)
    second.backward()
    return [first.error(times=2), second.error()]


def _good_step(group: dist.ProcessGroup) -> list[float]:
    call = Call(group, 9)
    call.backward()
    return [call.error()]


def exception_before_the_ring(group: dist.ProcessGroup) -> list[float]:
    """A hook raises before attention's backward begins; afterwards that same backward can still be run."""
    waiting, broken = Call(group, 1), Call(group, 2)
    handle = broken.out.register_hook(_break)
    with pytest.raises(Broken):
        broken.backward()
    found = _good_step(group)
    handle.remove()
    broken.backward()
    waiting.backward()
    return [*found, broken.error(), waiting.error()]


def exception_behind_the_ring(group: dist.ProcessGroup) -> list[float]:
    """A hook raises when attention's backward is done and its gradients are on their way to the leaves."""
    waiting, broken = Call(group, 1), Call(group, 2)
    broken.leaves[0].register_hook(_break)
    with pytest.raises(Broken):
        broken.backward()
    found = _good_step(group)
    waiting.backward()
    return [*found, waiting.error()]


def exception_in_a_recomputation(group: dist.ProcessGroup) -> list[float]:
    """A checkpointed block raises when it is computed again."""
    runs = []

    def recompute() -> None:
        runs.append(len(runs))
        if len(runs) == 2:
            raise Broken

    waiting, broken = Call(group, 1), Call(group, 2, recompute)
    with pytest.raises(Broken):
        broken.backward()
    found = _good_step(group)
    waiting.backward()
    return [*found, waiting.error()]


def exception_on_one_rank(group: dist.ProcessGroup) -> list[float]:
    """Rank 0 leaves a backward by an exception and begins the next step, while its peers are still in the backward.

    That is two different calls: every rank is told, and the step after that is good.
    """
    rank, _ = place_of(group)
    waiting, broken = Call(group, 1), Call(group, 2)
    if rank == 0:
        broken.out.register_hook(_break)
        with pytest.raises(Broken):
            broken.backward()
    with pytest.raises(ValueError, match="disagree about call"):
        _ = Call(group, 3) if rank == 0 else broken.backward()
    found = _good_step(group)
    waiting.backward()
    return [*found, waiting.error()]

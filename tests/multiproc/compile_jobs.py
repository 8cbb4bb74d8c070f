"""Jobs of the pool that compile: the whole front and the op in one graph, no break."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from ring_jobs import shards_of
from user_jobs import place_of

import ringspan as rs


class Counter:
    """A backend that counts compilations and hands on to another."""

    def __init__(self, backend: str) -> None:
        self.count = 0
        self._backend = dynamo.lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, example: list) -> Callable:
        self.count += 1
        return self._backend(graph, example)


def distance(eager: list[torch.Tensor], compiled: list[torch.Tensor]) -> float:
    """Largest difference relative to the largest value of each eager result."""
    return max(
        float((one - two).abs().max() / one.abs().max().clamp(min=1e-30))
        for one, two in zip(eager, compiled, strict=True)
    )


def lengths(
    group: dist.ProcessGroup, backend: str, dynamic: bool | None, exchange: str
) -> dict[str, float | list[int]]:
    """Forward and backward at three lengths: distance from eager, and compilations after each length."""
    rank, world = place_of(group)
    dynamo.reset()
    counter = Counter(backend)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, stats = rs.attention(
            q.sin(), k, v, mask=rs.causal(), group=group, scale=0.31, exchange=exchange, return_stats=True
        )
        return out.cos() + stats.lse.sigmoid()[..., None]

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    worst, counts = 0.0, []
    for rows in (9, 13, 21):
        *leaves, dout = shards_of(rs.ShardMap.contiguous(rows * world, world), rank, rows)
        results = []
        for call in (step, compiled):
            out = call(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        worst = max(worst, distance(*results))
        counts.append(counter.count)
    return {"distance": worst, "compilations": counts}


def new_values(group: dist.ProcessGroup, backend: str) -> dict[str, float | int]:
    """Documents and maps whose values change from step to step compile once."""
    rank, world = place_of(group)
    dynamo.reset()
    counter = Counter(backend)
    smap = rs.ShardMap.head_tail(24, world)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        mask = rs.documents(lengths=documents) & rs.window(5)
        return rs.attention(q, k, v, mask=mask, shard_map=smap, group=group)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    worst = 0.0
    *leaves, dout = shards_of(smap, rank)
    for documents in ([24, 0, 0], [10, 7, 7], [1, 2, 21]):
        table = torch.tensor(documents)
        results = []
        for call in (step, compiled):
            out = call(*leaves, table)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
        worst = max(worst, distance(*results))
    return {"distance": worst, "compilations": counter.count}


def masks_and_maps(group: dist.ProcessGroup) -> float:
    """Every mask and map traces without a break, also where it is made inside the compiled function."""
    rank, world = place_of(group)
    ids = torch.tensor([1] * 9 + [0] * 3 + [2] * 12)
    makers = [
        rs.full,
        rs.causal,
        lambda: rs.window(3, 1),
        lambda: rs.chunked(5),
        lambda: rs.prefix([4]),
        lambda: rs.documents(ids=ids, inside=rs.window(2)),
        lambda: rs.documents(lengths=[10, 14]),
        lambda: rs.bands([(0, 24, 0, 12, None, 0)]) | rs.window(1),
    ]
    maps = [
        lambda: rs.ShardMap.striped(24, world),
        lambda: rs.ShardMap.head_tail(24, world),
        lambda: rs.ShardMap.from_lengths([24 - world + 1, *[1] * (world - 1)]),
    ]
    outside = [rs.ShardMap.from_segments([[(0, r, 24 // world, world)] for r in range(world)])]
    pairs = [(make_mask, make_map) for make_mask in makers for make_map in maps[:1]]
    pairs += [(rs.causal, make_map) for make_map in [*maps, lambda: outside[0]]]
    worst = 0.0
    for make_mask, make_map in pairs:
        dynamo.reset()

        def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return rs.attention(q, k, v, mask=make_mask(), shard_map=make_map(), group=group)  # noqa: B023

        leaves = shards_of(make_map(), rank)[:3]
        results = [
            [call(*leaves).detach()] for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager"))
        ]
        worst = max(worst, distance(*results))
    return worst

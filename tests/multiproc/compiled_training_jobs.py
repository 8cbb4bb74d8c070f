"""Jobs of the pool that compile a module's training step and set it against the same step without a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from compile_jobs import Counter
from torch import Tensor, nn
from training_model import HEAD_DIM, HEADS, RATE, VOCABULARY, Decoder, build, draw, token_losses

import ringspan as rs


def place_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and size; None is one rank, which needs no processes."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


class TrainedModule(nn.Module):
    """One block with embedding, head and loss."""

    map_from = "sizes"

    def __init__(self, group: dist.ProcessGroup | None, world: int, checkpoint: bool = False) -> None:
        super().__init__()
        self.decoder: Decoder = build(False if checkpoint else None)
        del self.decoder.blocks["1"]
        self.group, self.world = group, world

    def forward(self, tokens: Tensor, targets: Tensor, valid: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        smap = rs.ShardMap.contiguous(tokens.shape[1] * self.world, self.world)

        def attention(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return rs.attention(q, k, v, mask=rs.causal(), shard_map=smap, group=self.group)

        losses = token_losses(self.decoder(tokens, positions, attention), targets)
        return rs.masked_mean_loss(losses, valid, group=self.group)


class SmallModule(nn.Module):
    """Little around the attention, for compilers that take their time. `map_from` says how forward comes to its map."""

    def __init__(self, group: dist.ProcessGroup | None, world: int, map_from: str = "sizes") -> None:
        super().__init__()
        self.group, self.world, self.map_from = group, world, map_from
        self.smap: rs.ShardMap | None = None
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.table = nn.Parameter(torch.randn(VOCABULARY, 3, HEADS, HEAD_DIM, dtype=torch.float64))

    def forward(
        self, tokens: Tensor, targets: Tensor, valid: Tensor, positions: Tensor, smap: rs.ShardMap | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.map_from == "sizes":
            smap = rs.ShardMap.contiguous(tokens.shape[1] * self.world, self.world)
        elif self.map_from == "attribute":
            smap = self.smap
        q, k, v = self.table[tokens].permute(2, 0, 3, 1, 4)
        out = rs.attention(q, k, v, mask=rs.causal(), shard_map=smap, group=self.group)
        return rs.masked_mean_loss((out.sum((1, 3)) - targets).square(), valid, group=self.group)


def _map_of(map_from: str, rows: int, world: int) -> rs.ShardMap:
    """Of `rows` local rows; maps from tables change their content too."""
    if map_from == "tables":
        return rs.ShardMap.per_document([rows // 2 * world, (rows - rows // 2) * world - 1, 1], world)
    return rs.ShardMap.contiguous(rows * world, world)


def _step(
    call: object, module: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None, rows: int
) -> list[Tensor]:
    """One step at a length: what is displayed, then the gradients over all ranks. `call` is `module`, or compiled."""
    rank, world = place_of(group)
    smap = _map_of(module.map_from, rows, world)
    batch = draw(rows, 2, smap.seq_len)
    mine = [smap.shard(x, rank, 1) for x in (batch.tokens, batch.targets, batch.valid)]
    module.smap = smap
    given = (smap,) if module.map_from in ("argument", "tables") else ()
    loss, shown = call(*mine, smap.positions(rank), *given)
    loss.backward()
    for parameter in module.parameters() if world > 1 else ():
        dist.all_reduce(parameter.grad, group=group)
    found = [shown, *(parameter.grad.clone() for parameter in module.parameters())]
    optimizer.step()
    optimizer.zero_grad()
    return found


def _worst(found: list[Tensor], right: list[Tensor]) -> float:
    return max(float((one - two).abs().max() / two.abs().max()) for one, two in zip(found, right, strict=True))


class Pair:
    """Two modules that begin alike, with an optimizer each: one to compile, and a twin that no compiler sees."""

    def __init__(self, make: Callable[[], nn.Module], group: dist.ProcessGroup | None) -> None:
        self.group, self.module, self.twin = group, make(), make()
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=RATE) for one in (self.module, self.twin)]

    def error(self, compiled: object, rows: int) -> float:
        """Of a step of both: displayed loss, gradients and the weights that the step leaves."""
        found = _step(compiled, self.module, self.optimizers[0], self.group, rows)
        right = _step(self.twin, self.twin, self.optimizers[1], self.group, rows)
        found += [parameter.detach() for parameter in self.module.parameters()]
        right += [parameter.detach() for parameter in self.twin.parameters()]
        return _worst(found, right)


def checkpointed_block(group: dist.ProcessGroup) -> dict[str, float | list[int]]:
    """`steps_of` a whole block."""
    _, world = place_of(group)
    return steps_of(Pair(lambda: TrainedModule(group, world, checkpoint=True), group), "aot_eager", None)


def with_optimizer(group: dist.ProcessGroup) -> dict[str, float | list[int]]:
    """`steps_of` a small module, sizes dynamic from the start, whose optimizer is compiled as well."""
    _, world = place_of(group)
    pair = Pair(lambda: SmallModule(group, world), group)
    pair.optimizers[0].step = torch.compile(pair.optimizers[0].step, backend="aot_eager")
    return steps_of(pair, "aot_eager", True)


def steps_of(pair: Pair, backend: str, dynamic: bool | None) -> dict[str, float | list[int]]:
    """A step at each of three lengths: distance from the twin, and compilations after each."""
    dynamo.reset()
    counter = Counter(backend)
    compiled = torch.compile(pair.module, fullgraph=True, backend=counter, dynamic=dynamic)
    worst, counts = 0.0, []
    for rows in (9, 13, 21):
        worst = max(worst, pair.error(compiled, rows))
        counts.append(counter.count)
    return {"distance": worst, "compilations": counts}


def shared_cache(_: dist.ProcessGroup, fresh: dist.ProcessGroup, folder: str, dynamic: bool) -> dict[str, float | int]:
    """Rank 0 fills the cache of compiled graphs while its peers run without a compiler; then all ranks use it.

    `fresh`: a group that is patient, because the peers wait while rank 0 compiles.
    """
    group = fresh
    rank, world = place_of(group)
    counters = dynamo.utils.counters
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        for filled in (False, True):
            dynamo.reset()
            counters.clear()
            pair = Pair(lambda: SmallModule(group, world), group)
            compiled = torch.compile(pair.module, fullgraph=True, dynamic=dynamic)
            call = compiled if filled or rank == 0 else pair.module
            worst = max(pair.error(call, rows) for rows in ((9, 13) if dynamic else (9,)))
    return {
        "distance": worst,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"],
    }

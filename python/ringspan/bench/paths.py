"""The ways to the same result that the benchmark compares.

    replicated        every rank already holds all of K and V; PyTorch's attention on the local queries
    gathered          each rank holds its shard of K and V; all-gather, then as replicated
    ring_local        rs.attention on the local queries and all of K and V: the ring's computation without its exchange
    ring_EXCHANGE     rs.attention on shards, K and V go round by all_to_all or p2p
    gather_all_gather the same, K and V come by one all_gather
    NAME_all_to_all   the same by another schedule (docs/schedules.md), such as pruned_all_to_all

`replicated` is what the others are compared with; `ring_local` and `replicated` are what an exchange is timed against.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ringspan as rs
from ringspan.bench.config import Config
from ringspan.bench.inputs import Inputs
from ringspan.bench.ranks import Ranks
from ringspan.gather import pad_rows

REPLICATED, GATHERED, RING_LOCAL = "replicated", "gathered", "ring_local"


class MeasuredPath:
    """One way. `base`: the path with the same computation and no exchange, or None where nothing is exchanged."""

    name: str
    base: str | None = None
    exchange: str | None = None
    schedule: str | None = None

    def run(self) -> tuple[Tensor, ...]:
        """This rank's output, with backward also dq, dk, dv: K/V gradients of its own rows, or `partial`."""
        raise NotImplementedError

    # Whether dk and dv are this rank's part of the gradients of all rows, still to be added up over ranks.
    partial = False

    def posted(self) -> tuple[int, int]:
        """Messages and bytes that this process has posted for paths of this kind so far."""
        return 0, 0

    def ledger(self, rank: int) -> tuple[int, int]:
        """Messages and bytes that one run on `rank` has to post."""
        return 0, 0


class Replicated(MeasuredPath):
    """PyTorch's attention; K and V lie as the all-gather leaves them, rows outermost, so that both compute alike."""

    name, partial = REPLICATED, True

    def __init__(self, config: Config, ranks: Ranks, inputs: Inputs) -> None:
        self.config, self.inputs = config, inputs
        self.segments = sorted(config.shard_map().segments(ranks.rank))
        self.keep = [self._keep(begin, length, ranks.device) for _, begin, length, _ in self.segments]
        self.kv = [_rows_first(x).permute(1, 2, 0, 3).requires_grad_(config.backward) for x in inputs.whole[1:3]]

    def run(self) -> tuple[Tensor, ...]:
        """Local queries over the K and V that this rank has had all along."""
        return self.attend(*self.kv)

    def attend(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Local queries over whole `key` and `value`; with backward all three gradients."""
        query, gradient = self.inputs.local[0], self.inputs.gradient
        out = self._forward(query, key, value)
        if gradient is None:
            return (out,)
        grads = torch.autograd.grad(out, (query, key, value), gradient, materialize_grads=True)
        return out.detach(), *grads

    def _forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = self.config.kv_heads != self.config.num_heads
        if self.config.mask == "full" and self.segments:
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)
        # A causal run of queries needs no key after its last position.
        parts = [
            F.scaled_dot_product_attention(
                query[:, :, row : row + length],
                key[:, :, : begin + length],
                value[:, :, : begin + length],
                attn_mask=keep,
                enable_gqa=grouped,
            )
            for (row, begin, length, _), keep in zip(self.segments, self.keep, strict=True)
        ]
        return torch.cat(parts, 2) if parts else query[:, :, :0]

    def _keep(self, begin: int, length: int, device: torch.device) -> Tensor:
        if self.config.mask == "full":
            return torch.empty(0)
        return torch.ones(length, begin + length, dtype=torch.bool, device=device).tril(begin)


class Gathered(MeasuredPath):
    """All-gather of K and of V, then `Replicated`. Shorter shards are padded to the longest one.

    Backward adds K/V gradients up by reduce-scatter in fp32 (fp64 for fp64), as the ring does.
    """

    name, base = GATHERED, REPLICATED

    def __init__(self, config: Config, ranks: Ranks, inputs: Inputs) -> None:
        self.config, self.ranks, self.inputs = config, ranks, inputs
        self.compute = Replicated(config, ranks, inputs)
        smap = config.shard_map()
        self.slot = max(smap.local_rows(rank) for rank in range(ranks.world))
        self.rows = smap.local_rows(ranks.rank)
        slots = [rank * self.slot + torch.arange(smap.local_rows(rank)) for rank in range(ranks.world)]
        positions = torch.cat([smap.positions(rank) for rank in range(ranks.world)])
        source = torch.cat(slots)[positions.argsort()]
        in_order = torch.equal(source, torch.arange(ranks.world * self.slot))
        self.source = None if in_order else source.to(ranks.device)

    def run(self) -> tuple[Tensor, ...]:
        """Gathers, attends, and with backward sends K/V gradients home."""
        whole = [self._gather(x.detach()) for x in self.inputs.local[1:3]]
        out, *grads = self.compute.attend(*(x.requires_grad_(self.config.backward) for x in whole))
        if not grads:
            return (out,)
        return out, grads[0], *(self._send_home(x) for x in grads[1:])

    def posted(self) -> tuple[int, int]:
        """What the tensors given to the collectives add up to."""
        return self.ranks.posted_messages, self.ranks.posted_bytes

    def ledger(self, rank: int) -> tuple[int, int]:
        """Forward as the plan counts all_gather; the reduce-scatter sends a padded gradient to each other rank."""
        world = self.ranks.world
        sent = self.config.plan("gather", "all_gather").ledger().rank(rank).forward.sent_bytes
        passes = 1
        if self.config.backward:
            numbers = self.slot * self.config.kv_heads * 2 * self.config.head_dim
            sent += (world - 1) * numbers * self.config.accumulator.itemsize
            passes = 2
        return (0 if world == 1 else 2 * passes), sent

    def _gather(self, local: Tensor) -> Tensor:
        whole = self.ranks.gather_rows(pad_rows(_rows_first(local), 0, self.slot))
        if self.source is not None:
            whole = whole.index_select(0, self.source)
        return whole.permute(1, 2, 0, 3)

    def _send_home(self, gradient: Tensor) -> Tensor:
        rows = gradient.permute(2, 0, 1, 3).to(self.config.accumulator)
        if self.source is not None:
            slots = rows.new_zeros((self.ranks.world * self.slot, *rows.shape[1:]))
            rows = slots.index_copy_(0, self.source, rows)
        own = self.ranks.reduce_rows(rows.contiguous())[: self.rows]
        return own.permute(1, 2, 0, 3).to(self.config.torch_dtype)


class _Attention(MeasuredPath):
    """rs.attention on `qkv` with `options`."""

    qkv: tuple[Tensor, ...]
    gradient: Tensor | None
    options: dict[str, Any]

    def run(self) -> tuple[Tensor, ...]:
        """One call, with a group its agreement included."""
        out: Any = rs.attention(*self.qkv, **self.options)
        if self.gradient is None:
            return (out,)
        return out.detach(), *torch.autograd.grad(out, self.qkv, self.gradient)


class RingLocal(_Attention):
    """rs.attention without a group: the whole K and V are this rank's, the queries are its shard."""

    name, partial = RING_LOCAL, True

    def __init__(self, config: Config, ranks: Ranks, inputs: Inputs) -> None:
        smap = config.shard_map()
        segments, rows = smap.segments(ranks.rank), smap.local_rows(ranks.rank)
        own = rs.ShardMap.from_segments([segments], seq_len=config.seq_len, local_rows=[rows])
        whole = rs.ShardMap.contiguous(config.seq_len, 1)
        self.options = {
            "mask": config.mask_of_call,
            "shard_map": own,
            "kv_shard_map": whole,
            "group": rs.LOCAL,
        }
        kv = [x.clone().requires_grad_(config.backward) for x in inputs.whole[1:3]]
        self.qkv, self.gradient = (inputs.local[0], *kv), inputs.gradient


class Scheduled(_Attention):
    """rs.attention over the group."""

    base = RING_LOCAL
    schedule: str
    exchange: str

    def __init__(self, config: Config, ranks: Ranks, inputs: Inputs, schedule: str, exchange: str) -> None:
        self.name = f"{schedule}_{exchange}"
        self.schedule, self.exchange = schedule, exchange
        self.config, self.ranks = config, ranks
        self.options = {
            "mask": config.mask_of_call,
            "shard_map": config.shard_map(),
            "group": ranks.group,
            "schedule": schedule,
            "exchange": exchange,
        }
        self.qkv, self.gradient = tuple(inputs.local[:3]), inputs.gradient

    def posted(self) -> tuple[int, int]:
        """As the library counts what it hands to c10d; the agreement is not counted."""
        messages, sent = torch.ops.ringspan._traffic(self.ranks.group.group_name)
        return messages, sent

    def ledger(self, rank: int) -> tuple[int, int]:
        """Sums over the passes that are run."""
        ledger = self.config.plan(self.schedule, self.exchange).ledger().rank(rank)
        passes = [ledger.forward, *([ledger.backward] if self.config.backward else [])]
        return sum(part.messages for part in passes), sum(part.sent_bytes for part in passes)


def build_paths(config: Config, ranks: Ranks, inputs: Inputs) -> dict[str, MeasuredPath]:
    """Every path that runs on this device, by name; `replicated` comes first. Those of rs.attention on CPUs only."""
    paths: list[MeasuredPath] = [Replicated(config, ranks, inputs), Gathered(config, ranks, inputs)]
    if ranks.device.type == "cpu":
        paths.append(RingLocal(config, ranks, inputs))
        paths += [Scheduled(config, ranks, inputs, *choice) for choice in config.choices()]
    return {path.name: path for path in paths}


def _rows_first(x: Tensor) -> Tensor:
    """BNSD as a contiguous [S, B, N, D]: what an all-gather along dim 0 joins to a whole sequence."""
    return x.permute(2, 0, 1, 3).contiguous()

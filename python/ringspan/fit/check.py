"""How far simulations are off: six workloads on real ranks of this machine, measured and simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ringspan as rs
from ringspan.bench.clock import Clock
from ringspan.bench.launch import run_on_processes
from ringspan.bench.ranks import Ranks
from ringspan.fit.measure import DTYPES

MEDIAN_LIMIT, WORST_LIMIT = 0.10, 0.25
_ROUNDS = 7


@dataclass(frozen=True)
class Workload:
    """One call, forward and backward; batch 1."""

    dtype: str
    mask: str
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    shard: str
    schedule: str

    @property
    def name(self) -> str:
        """As the table shows it."""
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.dtype} {self.mask}, {self.seq_len} rows, {heads}, {self.schedule} over {self.shard}"

    def make_mask(self) -> Any:
        """The mask of its name."""
        if self.mask == "full":
            return rs.full()
        if self.mask == "causal":
            return rs.causal()
        if self.mask == "window":
            return rs.window(left=self.seq_len // 16 - 1, right=0)
        # Long and short ones, in sixteenths of the sequence.
        return rs.documents(lengths=[sixteenths * self.seq_len // 16 for sixteenths in (6, 1, 1, 3, 1, 4)])

    def make_map(self, world: int) -> rs.ShardMap:
        """The map of its name."""
        if self.shard == "balanced":
            return rs.ShardMap.balanced(self.make_mask(), self.seq_len, world)
        return getattr(rs.ShardMap, self.shard)(self.seq_len, world)

    def shapes(self) -> list[tuple[int, ...]]:
        """Of query, key and value, whole."""
        return [(1, n, self.seq_len, self.head_dim) for n in (self.heads, self.kv_heads, self.kv_heads)]


WORKLOADS = (
    Workload("fp32", "full", 2048, 8, 8, 64, "contiguous", "ring"),
    Workload("fp32", "causal", 4096, 4, 4, 64, "head_tail", "pruned"),
    Workload("bf16", "causal", 4096, 4, 2, 128, "head_tail", "ring"),
    Workload("fp32", "window", 8192, 4, 4, 64, "contiguous", "pruned"),
    Workload("bf16", "documents", 4096, 8, 8, 64, "balanced", "gather"),
    Workload("fp32", "causal", 2048, 8, 4, 128, "contiguous", "ulysses"),
)


@dataclass(frozen=True)
class Comparison:
    """Seconds of one workload, forward and backward together."""

    world: int
    workload: Workload
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Of the simulation, relative to what was measured."""
        return abs(self.simulated / self.measured - 1)


def compare(description: dict[str, Any], worlds: Sequence[int], rounds: int = _ROUNDS) -> Iterator[Comparison]:
    """Measures, in `rounds` calls, and simulates every workload on every number of ranks."""
    machine = rs.Machine.from_json(json.dumps(description))
    for world in worlds:
        measured = run_on_processes(world, _measure, (WORKLOADS, rounds))
        for workload, seconds in zip(WORKLOADS, measured, strict=True):
            plan = rs.plan(
                *workload.shapes(),
                dtype=DTYPES[workload.dtype],
                mask=workload.make_mask(),
                shard_map=workload.make_map(world),
                schedule=workload.schedule,
            )
            yield Comparison(world, workload, seconds, plan.simulate(machine).seconds)


def run(description: dict[str, Any], worlds: Sequence[int]) -> int:
    """Prints the table; 1 where the errors are beyond the limits."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    table = Table(title=f"Simulated and measured, {description['name']}")
    for heading in ("ranks", "workload, forward and backward", "measured, ms", "simulated, ms", "error"):
        table.add_column(heading, justify="left" if heading.startswith("workload") else "right")
    errors = []
    with Console(stderr=True).status("measuring the workloads") as status:
        for found in compare(description, worlds):
            errors.append(found.error)
            times = (f"{found.measured * 1e3:.1f}", f"{found.simulated * 1e3:.1f}")
            table.add_row(str(found.world), found.workload.name, *times, f"{100 * found.error:.1f} %")
            status.update(f"{len(errors)} of {len(worlds) * len(WORKLOADS)} workloads")
    console.print(table)
    median, worst = summary_of(errors)
    console.print(
        f"median error {100 * median:.1f} % (limit {100 * MEDIAN_LIMIT:.0f} %), worst {100 * worst:.1f} % "
        f"(limit {100 * WORST_LIMIT:.0f} %)",
        highlight=False,
    )
    return int(median > MEDIAN_LIMIT or worst > WORST_LIMIT)


def summary_of(errors: Sequence[float]) -> tuple[float, float]:
    """Median and largest."""
    return torch.tensor(sorted(errors), dtype=torch.float64).quantile(0.5).item(), max(errors)


def _measure(group: dist.ProcessGroup, argument: tuple[Sequence[Workload], int]) -> Iterator[float]:
    """The shortest seconds of each workload."""
    workloads, rounds = argument
    ranks = Ranks(group)
    clock = Clock(ranks)
    for workload in workloads:
        smap = workload.make_map(ranks.world)
        shapes = workload.shapes()
        whole = [torch.randn(shape).to(DTYPES[workload.dtype]) for shape in (*shapes, shapes[0])]
        *qkv, dout = (smap.shard(x, ranks.rank, dim=2).contiguous() for x in whole)
        leaves = [x.requires_grad_() for x in qkv]
        options = {"mask": workload.make_mask(), "shard_map": smap, "group": group, "schedule": workload.schedule}

        def call(leaves: Any = leaves, dout: Any = dout, options: Any = options) -> None:
            out: Any = rs.attention(*leaves, **options)
            torch.autograd.grad(out, leaves, dout)

        yield clock.shortest(call, rounds)

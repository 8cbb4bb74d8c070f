"""Rows of the simulator.

sim/time/...         seconds that it takes itself for 4,096 ranks and 16M tokens
sim/prediction/...   how far it is off, on two and four real ranks of this machine, after `ringspan fit`
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from ringspan.bench.clock import Clock
from ringspan.bench.launch import run_on_processes
from ringspan.fit import check
from ringspan.fit.measure import Request, measure
from ringspan.fit.solve import Node, solve
from settings import Settings

import ringspan as rs

_SIMULATED = ("ring", "gather", "ulysses", "pruned", "q_ring", "hybrid", "double_ring")
_MOST_SECONDS = 10.0
_SUMMARY = "sim/prediction/all"


def names(settings: Settings) -> list[str]:
    """All rows."""
    predictions = [_name_of(world, workload) for world in _worlds(settings) for workload in check.WORKLOADS]
    return [*(f"sim/time/{schedule}" for schedule in _SIMULATED), *predictions, _SUMMARY]


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields each row's result. All predictions are measured where one is asked for: the summary is of all."""
    for name in selected:
        if name.startswith("sim/time/"):
            yield _time(name, settings)
    if any(name.startswith("sim/prediction/") for name in selected):
        yield from (row for row in _predict(settings) if row["name"] in selected)


def _worlds(settings: Settings) -> tuple[int, ...]:
    return (2,) if settings.quick else (2, 4)


def _name_of(world: int, workload: check.Workload) -> str:
    heads = f"H{workload.heads}_{workload.kv_heads}"
    words = (f"W{world}", workload.dtype, workload.mask, f"S{workload.seq_len}", heads, f"D{workload.head_dim}")
    return "/".join(("sim/prediction", *words, workload.schedule))


def _time(name: str, settings: Settings) -> dict[str, Any]:
    world, seq_len = (64, 1 << 18) if settings.quick else (4096, 1 << 24)
    schedule = name.rsplit("/", 1)[1]
    if schedule == "hybrid":
        schedule = rs.hybrid(ulysses=8, ring=world // 8)
    if schedule == "double_ring":
        schedule = rs.double_ring(inner=8, outer=world // 8)
    shapes = [(1, heads, seq_len, 128) for heads in (64, 8, 8)]
    smap = rs.ShardMap.head_tail(seq_len, world)
    plan = rs.plan(*shapes, dtype=torch.bfloat16, mask=rs.causal(), shard_map=smap, schedule=schedule)
    machine = rs.Machine.example("dgx-h100")
    seconds = Clock().seconds(lambda: plan.simulate(machine))
    goal = {"name": "seconds", "what": "s for 4096 ranks", "value": seconds, "at_most": _MOST_SECONDS}
    return {"name": name, "threads": os.cpu_count(), "milliseconds": {}, "goals": [goal], "wrong": None}


def _predict(settings: Settings) -> Iterator[dict[str, Any]]:
    worlds, rounds = _worlds(settings), 1 if settings.quick else 7
    request = Request(ranks_per_node=max(worlds), **({"seq_len": 64, "repeats": 1} if settings.quick else {}))
    description = solve(
        run_on_processes(min(worlds), measure, request),
        name="this machine",
        source="bench/run.py",
        node=Node(ranks=max(worlds), processors=os.cpu_count() or 1, memory_bytes=0, waits_for_all=True),
    )
    errors = []
    for found in check.compare(description, worlds, rounds):
        errors.append(found.error)
        yield {
            "name": _name_of(found.world, found.workload),
            "threads": f"{found.world} x 1",
            "milliseconds": {"measured": found.measured * 1e3, "simulated": found.simulated * 1e3},
            "goals": [_goal("error", 100 * found.error, 100 * check.WORST_LIMIT)],
            "wrong": None,
        }
    median, worst = check.summary_of(errors)
    goals = [
        _goal("median", 100 * median, 100 * check.MEDIAN_LIMIT),
        _goal("worst", 100 * worst, 100 * check.WORST_LIMIT),
    ]
    yield {"name": _SUMMARY, "threads": "", "milliseconds": {}, "goals": goals, "wrong": None}


def _goal(name: str, percent: float, most: float) -> dict[str, Any]:
    return {"name": name, "what": f"% {name}", "value": percent, "at_most": most}

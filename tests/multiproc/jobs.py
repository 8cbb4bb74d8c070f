"""Jobs of the pool: comparisons with the oracle, and scripts. See `pool.Pool` for how they are called."""

from __future__ import annotations

import torch
import torch.distributed as dist
from cases import Case, errors_of, squared_errors_of


def errors(group: dist.ProcessGroup, cases: list[Case]) -> list[dict[str, float]]:
    """`errors_of` for each case."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return [errors_of(case, group, rank, world) for case in cases]


def squared_errors(group: dist.ProcessGroup, cases: list[Case]) -> list[dict[str, tuple[float, int]]]:
    """`squared_errors_of` for each case."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return [squared_errors_of(case, group, rank, world) for case in cases]


def run_script(_: dist.ProcessGroup, script: str, name: str) -> None:
    """Runs a script as `name`; what it asserts is the result."""
    with torch.random.fork_rng():
        exec(compile(script, name, "exec"), {"__name__": "snippet"})

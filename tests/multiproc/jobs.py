"""Jobs of the pool: comparisons with the oracle, and scripts. See `pool.Pool` for how they are called."""

from __future__ import annotations

import torch
import torch.distributed as dist
from cases import Case, errors_of, squared_errors_of


def errors(group: dist.ProcessGroup, cases: list[Case]) -> list[dict[str, float]]:
    """`errors_of` for each case."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return [errors_of(case, group, rank, world) for case in cases]


def errors_or_words(group: dist.ProcessGroup, cases: list[Case]) -> list[dict[str, float]]:
    """`errors`; a case that raises has what it says as an error of inf."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for case in cases:
        try:
            found.append(errors_of(case, group, rank, world))
        except (ValueError, RuntimeError) as error:
            found.append({f"{type(error).__name__} {str(error)[:300]}": float("inf")})
    return found


def squared_errors(group: dist.ProcessGroup, cases: list[Case]) -> list[dict[str, tuple[float, int]]]:
    """`squared_errors_of` for each case."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return [squared_errors_of(case, group, rank, world) for case in cases]


def run_script(_: dist.ProcessGroup, script: str, name: str) -> None:
    """Runs a script as `name`; what it asserts is the result."""
    with torch.random.fork_rng():
        exec(compile(script, name, "exec"), {"__name__": "snippet"})

"""`choose_plan`: which schedule, shard map and mesh to run a call with on a machine, and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringspan.call import check_choices, read_sizes
from ringspan.machines import Machine, check_machine
from ringspan.masks import Full, Mask
from ringspan.names import PLAIN_MAPS, check_schedule
from ringspan.plan import check_world_size, question_of
from ringspan.simulation import Choice, Question, choice_of

_FULL = Full()


def choose_plan(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *,
    world_size: int,
    machine: Machine,
    mask: Mask = _FULL,
    dtype: torch.dtype = torch.float32,
    layout: str = "BNSD",
    num_heads: int | None = None,
    scale: float | None = None,
    exchange: str = "auto",
    schedules: Sequence[str] | None = None,
    shards: Sequence[str] | None = None,
    tensor_parallel: Sequence[int] = (1,),
    backward: bool = True,
) -> Choice:
    """Simulates every candidate on the machine and ranks them; nothing runs. docs/simulator.md says what is counted.

    query, key, value: sizes of the whole sequences and of all heads, as in `plan`. world_size: all ranks, those of
    tensor parallelism too. schedules: names as `attention` takes them, None for all that make sense. shards: of
    contiguous, head_tail, striped, balanced, None for all. tensor_parallel: numbers of neighbouring ranks that split
    heads. backward: whether it counts. ValueError for bad arguments; a candidate that cannot run is one in the answer.
    """
    check_machine(machine)
    given = locals() | {"shard_map": None, "kv_shard_map": None, "schedule": "auto"}
    check_choices(given)
    check_world_size(world_size)
    for schedule in schedules or ():
        check_schedule(schedule)
    for shard in shards or ():
        if shard not in PLAIN_MAPS:
            raise ValueError(f"shard is {shard!r}; give some of {', '.join(PLAIN_MAPS)}")
    for ranks in tensor_parallel:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"tensor_parallel has {ranks!r}; give numbers of ranks, at least 1")
    sizes = read_sizes(tuple(query), tuple(key), tuple(value), layout, num_heads)
    answer = torch.ops.ringspan._choose_json(
        *question_of(given, sizes, world_size),
        list(schedules or ()),
        machine.to_json(),
        list(shards or ()),
        list(tensor_parallel),
        backward,
    )
    return choice_of(answer, Question((sizes.q_rows, sizes.kv_rows), world_size, mask, exchange))

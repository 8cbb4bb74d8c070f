"""`plan`: what a call would compute and send, without running it. `choose_plan`: which call to make, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.call import Given, Sizes, check_choices, encode_global_call, read_sizes, resolve_scale
from ringspan.group import Group, name_and_world
from ringspan.ledger import Ledger
from ringspan.machines import Machine, check_machine
from ringspan.masks import Full, Mask
from ringspan.names import PLAIN_MAPS, check_schedule, name_of_dtype
from ringspan.numbers import check_whole
from ringspan.pairs import check_fits, check_pairs, complete_numbers
from ringspan.schedules import schedule_of_call
from ringspan.shard_map import ShardMap
from ringspan.simulation import Choice, Question, Simulation, choice_of, simulation_of

_FULL = Full()
_WHOLE = -1  # the rank that stands for all ranks
_MOST_TRACED_RANKS = 256


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sends; the agreement is not counted."""

    forward: int
    backward: int


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan; `forward` and `backward` are its steps, plain numbers by name."""

    rank: int
    sent_bytes: SentBytes
    _json: str = field(repr=False)
    _text: str = field(repr=False)

    @property
    def forward(self) -> list[dict[str, Any]]:
        """The steps of the forward pass, each with its tiles and transfers."""
        return self._steps("forward")

    @property
    def backward(self) -> list[dict[str, Any]]:
        """The steps of the backward pass."""
        return self._steps("backward")

    def to_json(self) -> str:
        """Everything in this part, as JSON; a tile is a list there, in the order of `tile_fields`."""
        return self._json

    def __str__(self) -> str:
        return self._text

    def _steps(self, direction: str) -> list[dict[str, Any]]:
        part = json.loads(self._json)
        names = part["tile_fields"]
        return [
            {**step, "tiles": [dict(zip(names, tile, strict=True)) for tile in step["tiles"]]}
            for step in part[direction]
        ]


class Plan:
    """Every rank's part of one call. Built rank by rank when asked; holds no tensor of data, group or device."""

    def __init__(self, world_size: int, question: tuple) -> None:
        self.world_size = world_size
        self._question = question

    def rank(self, rank: int) -> RankPlan:
        """The part of `rank`, its place in the group. ValueError outside 0..world_size-1."""
        sent = self.sent_bytes(rank)
        text = self._ask(torch.ops.ringspan._plan_text, rank)
        return RankPlan(rank, sent, self._ask(torch.ops.ringspan._plan_json, rank), text)

    def sent_bytes(self, rank: int) -> SentBytes:
        """Bytes that `rank` sends, the short answer of `ledger()`. ValueError outside 0..world_size-1."""
        ledger = self.ledger().rank(rank)
        return SentBytes(ledger.forward.sent_bytes, ledger.backward.sent_bytes)

    def to_json(self) -> str:
        """All ranks' parts, as JSON."""
        return self._ask(torch.ops.ringspan._plan_json, _WHOLE)

    def __str__(self) -> str:
        return self._ask(torch.ops.ringspan._plan_text, _WHOLE)

    def ledger(self) -> Ledger:
        """What every rank sends, computes and holds, by step."""
        return Ledger(self.world_size, partial(self._ask, torch.ops.ringspan._ledger_json))

    def simulate(self, machine: Machine, *, steps_of: Sequence[int] = ()) -> Simulation:
        """How long the call takes on a machine; the steps of the ranks in `steps_of` are kept. docs/simulator.md."""
        check_machine(machine)
        op = torch.ops.ringspan._simulate_json
        return simulation_of(op(*self._question, machine.to_json(), list(steps_of)))

    def save_trace(self, path: str | os.PathLike[str], machine: Machine | None = None) -> None:
        """Writes a timeline that Perfetto opens, of the first 256 ranks at most. None stands for Machine.nominal()."""
        machine = Machine.nominal() if machine is None else machine
        check_machine(machine)
        ranks = list(range(min(self.world_size, _MOST_TRACED_RANKS)))
        trace = torch.ops.ringspan._trace_json(*self._question, machine.to_json(), ranks)
        Path(path).write_text(trace, encoding="utf-8")

    def plot(self, path: str | os.PathLike[str], machine: Machine | None = None) -> None:
        """Draws the mask with who holds what, and who computes when; the format is that of the file's name (.png).

        None stands for Machine.nominal(), as the title then says. Needs matplotlib.
        """
        machine = Machine.nominal() if machine is None else machine
        check_machine(machine)
        text = torch.ops.ringspan._picture_json(*self._question, machine.to_json())
        # Late: only pictures need matplotlib.
        from ringspan.picture import draw

        draw(json.loads(text), path)

    def _ask(self, op: Any, rank: int) -> Any:
        return op(*self._question, rank)


def plan(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    mask: Mask = _FULL,
    shard_map: ShardMap | None = None,
    kv_shard_map: ShardMap | None = None,
    world_size: int | None = None,
    group: Group = None,
    layout: str = "BNSD",
    num_heads: int | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    bias: Any = None,
    sink: Tensor | None = None,
    schedule: Any = "auto",
    exchange: str = "auto",
    **numbers: Any,
) -> Plan:
    """The plan of `attention` with these arguments, for every rank.

    query, key, value: sizes of the *whole* sequences in `layout`, such as (1, 8, 4096, 64). The number of ranks comes
    from `world_size`, else from the map, else from `group`, else it is 1. numbers: softcap, dropout_p and the others of
    `attention`; like bias and sink they change neither steps nor messages. Raises what `attention` raises.
    """
    given = locals()
    given |= complete_numbers("plan", given.pop("numbers"))
    check_pairs(given)
    check_choices(given)
    name_of_dtype(dtype)  # before what depends on it
    check_fits(given, dtype)
    sizes = read_sizes(tuple(query), tuple(key), tuple(value), layout, num_heads)
    given_map = shard_map or kv_shard_map
    if world_size is None:
        world_size = name_and_world(group)[1] if given_map is None or group is not None else given_map.world_size
    check_whole("world_size", world_size, 1)
    return Plan(world_size, question_of(given, sizes, world_size))


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
    check_whole("world_size", world_size, 1)
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


def question_of(given: Given, sizes: Sizes, world_size: int) -> tuple[Any, ...]:
    """What the library's ops on plans ask for first, of a call whose sizes are those of the whole sequences."""
    spec, tables = encode_global_call(sizes, given, world_size)
    heads_and_dims = (sizes.q_heads, sizes.kv_heads, sizes.qk_dim, sizes.v_dim)
    scale = resolve_scale(given["scale"], sizes.qk_dim, given["dtype"])
    choices = (given["layout"], schedule_of_call(given["schedule"], given["exchange"]), given["exchange"])
    return spec, tables, *heads_and_dims, name_of_dtype(given["dtype"]), scale, *choices

"""How long a plan takes on a machine, as the simulator sees it: a model, not a measurement (docs/simulator.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from ringspan.masks import Mask
from ringspan.shard_map import ShardMap

_GIB = 1024.0**3


@dataclass(frozen=True)
class StepTimes:
    """When one rank did what in a step, in seconds since the pass began: it waits for inputs, computes, and is done."""

    step: int
    begin: float
    compute_begin: float
    compute_end: float
    end: float


@dataclass(frozen=True)
class RankTimes:
    """One rank in one pass. `wait_seconds` is for messages; `steps` are there for the ranks that were asked for."""

    compute_seconds: float
    copy_seconds: float
    wait_seconds: float
    end: float
    steps: tuple[StepTimes, ...] = ()


@dataclass(frozen=True)
class SimulatedPass:
    """Forward or backward: `seconds` until the last rank is done, and means over ranks of what they did in this time.

    exposed_seconds: waiting for messages, and copying. idle_seconds: done before the last one.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    idle_seconds: float
    slowest_rank: int
    ranks: tuple[RankTimes, ...]


@dataclass(frozen=True)
class Simulation:
    """A call on a machine. From `Plan.simulate`; `str()` is a table.

    memory_bytes: of the rank that holds the most: the tensors of the call and what it allocates. ranks_built: fewer
    than the world where the others are estimated from them. fits: whether the machine has that much memory (True where
    it does not say).
    """

    forward: SimulatedPass
    backward: SimulatedPass
    memory_bytes: int
    memory_rank: int
    ranks_built: int
    fits: bool

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward.seconds + self.backward.seconds

    def __str__(self) -> str:
        lines = [f"{'':<9}{'total, ms':>13}{'compute':>13}{'exposed':>13}{'idle':>13}{'slowest rank':>14}"]
        for name, part in (("forward", self.forward), ("backward", self.backward)):
            columns = (part.seconds, part.compute_seconds, part.exposed_seconds, part.idle_seconds)
            lines.append(f"{name:<9}" + "".join(map(_milliseconds, columns)) + f"{part.slowest_rank:>14}")
        lines.append(f"{'both':<9}{_milliseconds(self.seconds)}")
        fit = "" if self.fits else ", which DOES NOT FIT"
        lines.append(f"memory: {_gib(self.memory_bytes)} on rank {self.memory_rank}{fit}")
        if self.ranks_built < len(self.forward.ranks):
            lines.append(f"estimated from {self.ranks_built} of {len(self.forward.ranks)} ranks")
        return "\n".join(lines)


@dataclass(frozen=True)
class Question:
    """What `choose_plan` was asked, as far as its answer depends on it. lengths: of queries and of keys."""

    lengths: tuple[int, int]
    world_size: int
    mask: Mask
    exchange: str


@dataclass(frozen=True)
class Candidate:
    """One way to run a call. `refused` says why it cannot run ("" where it can); its figures are then 0, or what they
    would be. Backward counts as 0 where the question left it out.

    tensor_parallel_seconds: of both passes, within their seconds: activations gathered and scattered between the ranks
    that split heads. exposed_seconds, idle_seconds: of both passes, means over ranks.
    """

    schedule: str
    shard: str
    tensor_parallel: int
    seconds: float
    forward_seconds: float
    backward_seconds: float
    tensor_parallel_seconds: float
    exposed_seconds: float
    idle_seconds: float
    memory_bytes: int
    refused: str
    question: Question = field(repr=False, compare=False)

    def arguments(self) -> dict[str, Any]:
        """The schedule, exchange and shard maps of a call of `attention`; tensors, mask and group are the caller's.

        The group has world_size / tensor_parallel ranks, each with its part of the heads. ValueError where the
        candidate cannot run.
        """
        if self.refused or not self.shard:
            raise ValueError(f"{self.schedule} over {self.shard or 'no shard map'} cannot run: {self.refused}")
        q_len, kv_len = self.question.lengths
        chosen: dict[str, Any] = {"schedule": self.schedule, "exchange": self.question.exchange}
        chosen["shard_map"] = self._map(q_len)
        if kv_len != q_len:
            chosen["kv_shard_map"] = self._map(kv_len)
        return chosen

    def _map(self, length: int) -> ShardMap:
        ranks = self.question.world_size // self.tensor_parallel
        if self.shard == "balanced":
            return ShardMap.balanced(self.question.mask, length, ranks)
        return getattr(ShardMap, self.shard)(length, ranks)


@dataclass(frozen=True)
class Choice:
    """What the planner found: every candidate, fastest first, refused ones last, and why the first is the first."""

    reason: str
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The first candidate, None where none can run."""
        return self.candidates[0] if self.candidates and not self.candidates[0].refused else None

    def __str__(self) -> str:
        lines = [f"{'schedule':<18}{'shard':<11}{'TP':>4}{'total, ms':>13}{'exposed':>13}{'idle':>13}{'memory':>13}"]
        for one in self.candidates:
            line = f"{one.schedule if one.shard else '-':<18}{one.shard:<11}{one.tensor_parallel:>4}"
            if one.seconds > 0:
                line += "".join(map(_milliseconds, (one.seconds, one.exposed_seconds, one.idle_seconds)))
                line += f"{_gib(one.memory_bytes):>13}"
            lines.append(line + (f"  refused: {one.refused}" if one.refused else ""))
        return "\n".join([*lines, self.reason])


def simulation_of(text: str) -> Simulation:
    """Reads the library's JSON of a simulation."""
    content = json.loads(text)
    content |= {name: _pass_of(content[name]) for name in ("forward", "backward")}
    return Simulation(**{field.name: content[field.name] for field in fields(Simulation)})


def choice_of(text: str, question: Question) -> Choice:
    """Reads the library's JSON of a choice."""
    content = json.loads(text)
    return Choice(content["reason"], tuple(Candidate(**one, question=question) for one in content["candidates"]))


def _pass_of(content: dict[str, Any]) -> SimulatedPass:
    ranks = tuple(
        RankTimes(**{**rank, "steps": tuple(StepTimes(**step) for step in rank.get("steps", ()))})
        for rank in content["ranks"]
    )
    return SimulatedPass(**{**content, "ranks": ranks})


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:>13.3f}"


def _gib(count: float) -> str:
    return f"{count / _GIB:.{4 if count < _GIB else 2}f} GiB"

"""What a plan sends, computes and holds, counted from its numbers; nothing runs. From `Plan.ledger()`.

Exact for what the library posts: tests hold it against the bytes that every exchange has really sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

_COLUMNS = ("k", "v", "dk", "dv")


@dataclass(frozen=True)
class StepLedger:
    """One step of one rank.

    sent: bytes that the rank sends, by tensor ("k", "v", "dk", "dv", and with some schedules "q", "out", "lse", ...).
    messages: what it posts; a collective counts as one. kept_pairs: (query, key) pairs of all batch entries, one head.
    flops: of the query heads that the rank computes.
    """

    step: int
    sent: dict[str, int]
    messages: int
    kept_pairs: int
    flops: int


@dataclass(frozen=True)
class PassLedger:
    """Forward or backward of one rank: sums of its steps.

    peak_bytes: the most that lives at once beside the caller's tensors (results, statistics, sums in fp32, and what
    travels), without the kernels' workspace of at most 60 MiB.
    """

    sent_bytes: int
    messages: int
    kept_pairs: int
    flops: int
    peak_bytes: int
    steps: tuple[StepLedger, ...]

    def sent(self, tensor: str) -> int:
        """Bytes of one tensor over all steps, such as "k"; 0 if it is never sent."""
        return sum(step.sent.get(tensor, 0) for step in self.steps)


@dataclass(frozen=True)
class RankLedger:
    """What one rank sends, computes and holds."""

    rank: int
    forward: PassLedger
    backward: PassLedger


class Ledger:
    """Every rank's ledger, made rank by rank when asked."""

    def __init__(self, world_size: int, json_of_rank: Callable[[int], str]) -> None:
        self.world_size = world_size
        self._json_of_rank = json_of_rank

    def rank(self, rank: int) -> RankLedger:
        """The ledger of `rank`, its place in the group. ValueError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a plan of {self.world_size} ranks")
        content = json.loads(self._json_of_rank(rank))
        return RankLedger(rank, _pass_of(content["forward"]), _pass_of(content["backward"]))

    def __iter__(self) -> Iterator[RankLedger]:
        return (self.rank(rank) for rank in range(self.world_size))

    def to_json(self) -> str:
        """All ranks, as JSON: `{"world_size":, "ranks": [{"rank":, "forward": {...}, "backward": {...}}]}`."""
        return json.dumps({"world_size": self.world_size, "ranks": [asdict(rank) for rank in self]})

    def __str__(self) -> str:
        """A table: a line for each rank and pass."""
        header = f"{'rank':>4}  {'pass':<8}" + "".join(f"{name + ', B':>14}" for name in (*_COLUMNS, "other"))
        lines = [header + f"{'messages':>10}{'pairs':>16}{'Gflop':>12}{'peak, B':>15}"]
        for rank in self:
            for name, part in (("forward", rank.forward), ("backward", rank.backward)):
                columns = [part.sent(tensor) for tensor in _COLUMNS]
                sent = "".join(f"{bytes_:>14}" for bytes_ in (*columns, part.sent_bytes - sum(columns)))
                counts = f"{part.messages:>10}{part.kept_pairs:>16}{part.flops / 1e9:>12.3f}{part.peak_bytes:>15}"
                lines.append(f"{rank.rank:>4}  {name:<8}{sent}{counts}")
        return "\n".join(lines)


def _pass_of(content: dict[str, Any]) -> PassLedger:
    steps = tuple(StepLedger(**step) for step in content["steps"])
    return PassLedger(**{**content, "steps": steps})

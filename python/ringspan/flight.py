"""The flight record: the last calls of this rank in each of its groups."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_VARIABLE = "RINGSPAN_FLIGHT_RECORD"


@dataclass(frozen=True)
class FlightEntry:
    """One call. Times are seconds since 1970, 0 for what has not happened."""

    group: str
    number: int
    """Of the call in its group, which is the same on all ranks; 0 under assume_agreed."""
    kind: str
    """"forward", "backward of call 3", "other" (unshard, the loss helper), "refused"."""
    place: str
    """"module:function+line" of the program that made the call; "" unknown."""
    signature: str
    """A hash of all that must be equal on the ranks: they can be compared."""
    step: int
    """Of the plan, as far as it was reached; -1 before the first."""
    transfer: str
    """What was last posted or waited for."""
    begun: float
    agreed: float
    ended: float
    outcome: str
    """"" while the call runs, "done", or the error."""


_TEXTS = len(FlightEntry.__dataclass_fields__)


def flight_record() -> list[FlightEntry]:
    """The last 64 calls of each group of several ranks in this process, the oldest of a group first.

    RINGSPAN_FLIGHT_RECORD=FILE has each rank write its record as JSON when a call fails for a peer's sake; "%r" in FILE
    becomes the rank of the process in the default group.
    """
    texts = torch.ops.ringspan._flight_record()
    return [_entry_of(texts[begin : begin + _TEXTS]) for begin in range(0, len(texts), _TEXTS)]


def write_flight_record() -> None:
    """Writes the record where RINGSPAN_FLIGHT_RECORD says, whole or not at all."""
    pattern = os.environ.get(_VARIABLE)
    if not pattern:
        return
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    path = Path(pattern.replace("%r", str(rank)))
    text = json.dumps({"rank": rank, "calls": [asdict(entry) for entry in flight_record()]}, indent=1)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _entry_of(texts: list[str]) -> FlightEntry:
    group, number, kind, place, signature, step, transfer, begun, agreed, ended, outcome = texts
    return FlightEntry(
        group=group,
        number=int(number),
        kind=kind,
        place=place,
        signature=f"{int(signature):016x}",
        step=int(step),
        transfer=transfer,
        begun=float(begun),
        agreed=float(agreed),
        ended=float(ended),
        outcome=outcome,
    )

"""How long this process waits for its peers, and what it does meanwhile."""

from __future__ import annotations

import logging
import threading

import torch

from ringspan.flight import write_flight_record
from ringspan.group import Group, name_and_world
from ringspan.numbers import is_finite, shown

_LOG = logging.getLogger("ringspan")


def set_deadline(seconds: float | None) -> None:
    """Bounds every wait for peers of this process, in all groups. None: each group's own timeout again.

    A rank that sees no sign of progress of its peers for that long raises `PeerError`. After 30 s, then every 5
    minutes, a warning of the logger "ringspan" names whom it waits for. RINGSPAN_DEADLINE (seconds) says the same from
    outside; what is set here goes before it.

    Raises ValueError for what is no length of time. A deadline longer than the timeout of a group, which PyTorch keeps
    in any case, is refused by the next call in it: ValueError with both values, on every rank.
    """
    if seconds is not None and not is_finite(seconds):
        raise ValueError(f"the deadline is {shown(seconds)}; give seconds, or None for each group's timeout")
    torch.ops.ringspan._set_deadline(None if seconds is None else float(seconds))


def hand_over(group: Group) -> None:
    """Lets another thread of this process make calls in `group`: the next that makes one. To be called on all ranks.

    Calls come in one order on all ranks, and no lock can give threads such an order. So the forwards, `unshard` and the
    loss helper of a group belong to the thread that called first; from another they are refused on every rank. Backward
    may come from any thread.
    """
    name, world = name_and_world(group)
    if name and world > 1:
        torch.ops.ringspan._hand_over(name)


def _while_waiting(warning: str) -> None:
    # That Python runs is enough: signal handlers that wait for their turn have it now.
    if warning:
        _LOG.warning("%s", warning)


def _thread_name() -> str:
    return threading.current_thread().name


# Kept, since the kernels go with it.
_LIBRARY = torch.library.Library("ringspan", "IMPL")
for _name, _kernel in (
    ("_while_waiting", _while_waiting),
    ("_thread_name", _thread_name),
    ("_write_flight_record", write_flight_record),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")

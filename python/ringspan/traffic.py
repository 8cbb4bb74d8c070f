"""`count_traffic`: what this process has really posted in a group, to hold against `Plan.ledger()`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ringspan.group import Group, name_and_world


@dataclass
class Traffic:
    """Counted inside the block: messages (a collective counts as one) and bytes sent to other ranks."""

    messages: int = 0
    sent_bytes: int = 0


@contextmanager
def count_traffic(group: Group) -> Iterator[Traffic]:
    """Counts what `attention` posts in `group`, forward and backward; complete when the block ends.

    Sizes are those of the tensors that were handed to the group, counted where they are handed over, not those of the
    plan. The agreement before a call is not counted. Of one rank (None, or LOCAL): nothing is ever posted.
    """
    name = name_and_world(group)[0] or ""
    messages, sent_bytes = torch.ops.ringspan._traffic(name)
    traffic = Traffic()
    try:
        yield traffic
    finally:
        now = torch.ops.ringspan._traffic(name)
        traffic.messages, traffic.sent_bytes = now[0] - messages, now[1] - sent_bytes

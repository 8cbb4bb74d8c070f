"""Names of schedules that are made of two numbers of ranks (docs/schedules.md)."""

from __future__ import annotations

import warnings

import torch

from ringspan.numbers import shown


def hybrid(*, ulysses: int, ring: int) -> str:
    """The schedule of teams of `ulysses` neighbouring ranks that split heads, and a ring of `ring` teams.

    The group must have ulysses * ring ranks. ValueError for a number below 1.
    """
    return _named("hybrid", ulysses=ulysses, ring=ring)


def double_ring(*, inner: int, outer: int) -> str:
    """The schedule of a ring within each node of `inner` neighbouring ranks, and one between `outer` nodes.

    The group must have inner * outer ranks. ValueError for a number below 1.
    """
    return _named("double_ring", inner=inner, outer=outer)


def schedule_of_call(schedule: str, exchange: str) -> str:
    """`schedule`; gather where a ring is asked to exchange by all_gather, as it could in the version before."""
    if schedule != "ring" or exchange != "all_gather":
        return schedule
    if not torch.compiler.is_compiling():
        warnings.warn(
            'schedule="ring" with exchange="all_gather" runs schedule gather and will be refused by the next version; '
            'use schedule="gather", exchange="all_gather"',
            FutureWarning,
            stacklevel=2,
        )
    return "gather"


def _named(kind: str, **counts: int) -> str:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {shown(count)}; give a number of ranks, at least 1")
    return f"{kind}:" + "x".join(str(count) for count in counts.values())

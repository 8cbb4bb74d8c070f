"""Names of schedules that are made of two numbers of ranks (docs/schedules.md)."""

from __future__ import annotations

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


def _named(kind: str, **counts: int) -> str:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {shown(count)}; give a number of ranks, at least 1")
    return f"{kind}:" + "x".join(str(count) for count in counts.values())

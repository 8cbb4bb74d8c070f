"""`rank_mesh`: which ranks form which group when several kinds of parallelism share the world.

World 8 as dp=2, cp=2, tp=2. The last axis changes fastest, so that the ranks that talk most are neighbours:

              tp 0   tp 1
    dp 0 cp 0    0      1      tp groups {0,1} {2,3} {4,5} {6,7}
         cp 1    2      3      cp groups {0,2} {1,3} {4,6} {5,7}
    dp 1 cp 0    4      5      dp groups {0,4} {1,5} {2,6} {3,7}
         cp 1    6      7

A rank's place in its group is its coordinate on that axis. A shard map counts by that place, so a group whose ranks
stand in another order would give every rank the wrong tokens: `RankMesh.check` refuses such a group.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.group import Group, Local, name_and_world

_AXES = ("dp", "cp", "ulysses", "tp")
# Ranks that hold one sequence between them: ring and Ulysses together.
_SEQUENCE = "sequence"
KINDS = (*_AXES, _SEQUENCE)


@dataclass(frozen=True)
class RankMesh:
    """A world of ranks in a grid with the axes dp, cp, ulysses, tp (slowest first). Made by `rank_mesh`."""

    world: int
    dp: int = 1
    cp: int = 1
    ulysses: int = 1
    tp: int = 1
    _groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict, repr=False, compare=False)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a global rank on every axis. ValueError outside 0..world-1."""
        self._check_rank(rank)
        places = torch.unravel_index(torch.tensor(rank), [getattr(self, axis) for axis in _AXES])
        return {axis: int(place) for axis, place in zip(_AXES, places, strict=True)}

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind ("dp", "cp", "ulysses", "tp", or "sequence" = cp x ulysses), as global ranks in order.

        Every rank is in exactly one of them.
        """
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; give one of {', '.join(KINDS)}")
        if kind not in self._groups:
            varying = ("cp", "ulysses") if kind == _SEQUENCE else (kind,)
            order = sorted(range(len(_AXES)), key=lambda place: _AXES[place] in varying)
            size = math.prod(getattr(self, axis) for axis in varying)
            grid = torch.arange(self.world).view([getattr(self, axis) for axis in _AXES])
            self._groups[kind] = tuple(map(tuple, grid.permute(order).reshape(-1, size).tolist()))
        return self._groups[kind]

    def group_of(self, rank: int, kind: str) -> tuple[int, ...]:
        """The group of a kind that a global rank belongs to, as global ranks in order."""
        self._check_rank(rank)
        return next(group for group in self.groups(kind) if rank in group)

    def check(self, kind: str, group: Group) -> None:
        """ValueError unless `group` has exactly this rank's group of that kind, in the mesh's order.

        `group`: a ProcessGroup or a DeviceMesh of one axis that this process belongs to.
        """
        name_and_world(group)
        if group is None or isinstance(group, Local):
            raise ValueError(f"group is {group!r}, this process alone; give the process group to check")
        given = tuple(dist.get_process_group_ranks(group.get_group() if isinstance(group, DeviceMesh) else group))
        wanted = self.group_of(dist.get_rank(), kind)
        if given == wanted:
            return
        order = " in another order" if sorted(given) == sorted(wanted) else ""
        raise ValueError(
            f"the {kind} group of rank {dist.get_rank()} has the ranks {list(given)}; in this mesh ({self}) it has "
            f"{list(wanted)}{order}. Make it with init_groups(), or with new_group(ranks, sort_ranks=False)"
        )

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in _AXES if getattr(self, axis) > 1) or "1 rank"

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world} ranks")


def rank_mesh(world: int, *, tp: int = 1, cp: int = 1, dp: int = 1, ulysses: int = 1) -> RankMesh:
    """The grid of `world` ranks with these degrees.

    ValueError where a degree is not a positive whole number, or where they do not multiply to `world`.
    """
    degrees = {"dp": dp, "cp": cp, "ulysses": ulysses, "tp": tp}
    for name, value in {"world": world, **degrees}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; give a whole number of at least 1")
    product = math.prod(degrees.values())
    if product != world:
        shown = " x ".join(f"{name} {value}" for name, value in degrees.items())
        raise ValueError(f"{shown} is {product} and the world has {world} ranks; the degrees must multiply to it")
    return RankMesh(world, dp=dp, cp=cp, ulysses=ulysses, tp=tp)


def init_groups(
    mesh: RankMesh, *, backend: str | None = None, timeout: datetime.timedelta | None = None
) -> dict[str, dist.ProcessGroup]:
    """Makes every process group of the mesh; returns this rank's, by kind ("dp", "cp", "ulysses", "tp", "sequence").

    Every rank of the world must call it, with the same mesh. Ranks stand in each group in the mesh's order. `backend`
    and `timeout` as in `torch.distributed.new_group`. ValueError where the world has another size.
    """
    if dist.get_world_size() != mesh.world:
        raise ValueError(
            f"the mesh has {mesh.world} ranks and the world {dist.get_world_size()}; build it for this world"
        )
    rank, mine = dist.get_rank(), {}
    for kind in KINDS:
        for ranks in mesh.groups(kind):
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend, sort_ranks=False)
            if rank in ranks:
                mine[kind] = group
    return mine

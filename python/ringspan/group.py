"""Process groups as the dispatcher ops know them: by name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


class Local:
    """The type of `ringspan.LOCAL`."""

    def __repr__(self) -> str:
        return "ringspan.LOCAL"

    def __reduce__(self) -> str:
        return "LOCAL"  # copied and unpickled as the one that there is


LOCAL = Local()
"""This process alone, where a group is asked for: said on purpose, where None could be a group that was forgotten."""

Group = ProcessGroup | DeviceMesh | Local | None


def name_and_world(group: Group) -> tuple[str | None, int]:
    """The registered name of `group` and its number of ranks; "" of `LOCAL`, None of None, both of one rank.

    Raises ValueError for a mesh of more than one axis, for a group that this process is no member of and for any
    other object.
    """
    if group is None:
        return None, 1
    if isinstance(group, Local):
        return "", 1
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a DeviceMesh of {group.ndim} axes; give one of 1 axis, such as mesh['cp']")
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group is {group!r}; give a ProcessGroup that this process belongs to, a DeviceMesh of one axis, or "
            "ringspan.LOCAL for this process alone"
        )
    return group.group_name, group.size()


def rank_in(group: Group) -> int:
    """This process's place in `group`, which `name_and_world` took."""
    if group is None or isinstance(group, Local):
        return 0
    return dist.get_rank(group.get_group() if isinstance(group, DeviceMesh) else group)


def group_of(group_name: str) -> ProcessGroup:
    """The group of a name that `name_and_world` gave; not of ""."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(group_name)


def world_mismatch(name: str, split: int, group: Group, world: int) -> ValueError:
    """The error of a map `name` over `split` ranks beside a group of `world`, with its likely cause."""
    told = f"{name} splits over {split} ranks, but"
    if group is None or group is LOCAL:
        return ValueError(
            f"{told} group={group!r} is this process alone (1 rank); pass the group that the map was made for"
        )
    return ValueError(f"{told} the group has {world}; pass the group that the map was made for")

"""Process groups as the dispatcher ops know them: by name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

Group = ProcessGroup | DeviceMesh | None


def name_and_world(group: Group) -> tuple[str, int]:
    """The registered name of `group` ("" for None, one rank) and its number of ranks.

    Raises ValueError for a mesh of more than one axis, for a group that this process is no member of and for any
    other object.
    """
    if group is None:
        return "", 1
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a DeviceMesh of {group.ndim} axes; give one of 1 axis, such as mesh['cp']")
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group is {group!r}; give a ProcessGroup that this process belongs to, a DeviceMesh of one axis, or None"
        )
    return group.group_name, group.size()


def rank_in(group: Group) -> int:
    """This process's place in `group`, which `name_and_world` took."""
    if group is None:
        return 0
    return dist.get_rank(group.get_group() if isinstance(group, DeviceMesh) else group)


def group_of(group_name: str) -> ProcessGroup:
    """The group of a name that `name_and_world` gave; not of ""."""
    return dist.distributed_c10d._resolve_process_group(group_name)


def tell_peers(group_name: str, error: Exception) -> None:
    """Publishes why this rank makes no call, so that its peers raise too. Traced code publishes nothing."""
    if group_name and not torch.compiler.is_compiling():
        torch.ops.ringspan._refuse(group_name, str(error), False, torch.ops.ringspan._calls(group_name))

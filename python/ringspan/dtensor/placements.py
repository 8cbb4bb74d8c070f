"""What each axis of a device mesh does in one attention call, and where its tensors lie then.

    role        query, key, value, out   statistics [B, N, S]   sink [N]    its gradient
    REPLICATE   Replicate                Replicate              Replicate   Replicate
    BATCH       Shard(batch axis)        Shard(0)               Replicate   Partial
    HEADS       Shard(head axis)         Shard(1)               Shard(0)    Shard(0)
    SEQUENCE    Shard(row axis)          Shard(2)               Replicate   Partial

Each axis gets the role that moves least of query, key and value, on equal terms the one that the query already has.
Sizes enter only where they must divide, so that a compiled graph serves every length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ringspan.call import AXES, Sizes


class Role:
    """The part of an attention call that ranks along one mesh axis share out. Strings: enums hash in Python."""

    REPLICATE = "replicate"
    BATCH = "batch"
    HEADS = "heads"
    SEQUENCE = "sequence"


# The axis of a tensor that a role cuts; a role that is absent cuts none.
TensorAxes = dict[str, int]
SINK_AXES: TensorAxes = {Role.HEADS: 0}


def axes_of_layout(layout: str) -> TensorAxes:
    """The axes of query, key, value and out. The heads of BSH and SBH lie in the last one."""
    batch, heads, rows = AXES[layout]
    axes = {Role.HEADS: 2 if heads is None else heads, Role.SEQUENCE: rows}
    return axes if batch is None else axes | {Role.BATCH: batch}


def axes_of_stats(layout: str) -> TensorAxes:
    """The axes of the statistics, [B, N, S] or in layout TND [T, N]."""
    if layout == "TND":
        return {Role.SEQUENCE: 0, Role.HEADS: 1}
    return {Role.BATCH: 0, Role.HEADS: 1, Role.SEQUENCE: 2}


def axes_of_slopes(slopes: Tensor) -> TensorAxes:
    """The axes of slopes, [N] or [B, N]."""
    return {Role.HEADS: slopes.dim() - 1} | ({Role.BATCH: 0} if slopes.dim() == 2 else {})


def out_shape(query: Sequence[int], sizes: Sizes, layout: str) -> list[int]:
    """Of the output, as that of the query."""
    _, heads, _ = AXES[layout]
    return [*query[:-1], sizes.v_dim * (sizes.q_heads if heads is None else 1)]


def stats_shape(sizes: Sizes, layout: str) -> list[int]:
    """Of the statistics."""
    return [sizes.q_rows, sizes.q_heads] if layout == "TND" else [sizes.batch, sizes.q_heads, sizes.q_rows]


def axes_of_pairs(shape: Sequence[int]) -> TensorAxes:
    """The axes of a mask or bias that expands to [B, N, Sq, Skv]; what it shares along an axis, it has no axis for."""
    found = {}
    for role, place in ((Role.BATCH, 4), (Role.HEADS, 3), (Role.SEQUENCE, 2)):
        if len(shape) >= place and shape[-place] != 1:
            found[role] = len(shape) - place
    return found


def axes_beside(name: str, tensor: Tensor, are_slopes: bool) -> TensorAxes:
    """The axes of a sink, of slopes, or else of a mask or bias."""
    if name == "sink":
        return SINK_AXES
    return axes_of_slopes(tensor) if are_slopes else axes_of_pairs(tensor.shape)


@dataclass(frozen=True)
class Roles:
    """The role of every axis of a mesh, and into how many parts each role cuts over all its axes."""

    mesh: DeviceMesh
    roles: tuple[str, ...]
    parts: dict[str, int]

    def placements(self, axes: TensorAxes) -> tuple[Placement, ...]:
        """Where a tensor with these axes lies."""
        return tuple(Shard(axes[role]) if role in axes else Replicate() for role in self.roles)

    def gradient_placements(self, axes: TensorAxes) -> tuple[Placement, ...]:
        """Where the gradient lies that the ranks get for it: parts of a sum where they share the tensor."""
        return tuple(
            Shard(axes[role]) if role in axes else Replicate() if role == Role.REPLICATE else Partial()
            for role in self.roles
        )

    def group_names(self, role: str) -> list[str]:
        """The groups of this process along the axes of a role, outermost first."""
        if role not in self.roles:
            return []
        return [self.mesh.get_group(axis).group_name for axis, found in enumerate(self.roles) if found == role]

    def sequence_group(self) -> ProcessGroup | None:
        """The group that shares out the sequence, None where none does."""
        return self.mesh.get_group(self.roles.index(Role.SEQUENCE)) if Role.SEQUENCE in self.roles else None


def choose_roles(mesh: DeviceMesh, placements: Sequence[tuple[Placement, ...]], sizes: Sizes, layout: str) -> Roles:
    """The cheapest roles for query, key and value that lie so.

    Batch entries and heads are cut only where their number divides; the sequence is cut by one axis, at any length.
    """
    axes = axes_of_layout(layout)
    counts = {Role.BATCH: (sizes.batch,), Role.HEADS: (sizes.q_heads, sizes.kv_heads)}
    parts = dict.fromkeys((Role.REPLICATE, Role.BATCH, Role.HEADS, Role.SEQUENCE), 1)
    roles: list[str] = []
    for axis in range(mesh.ndim):
        size = mesh.size(axis)
        current = [placement[axis] for placement in placements]
        best, least = Role.REPLICATE, float("inf")
        for role in _tried(current[0], axes):
            if role in counts:
                offered = all(count % (parts[role] * size) == 0 for count in counts[role])
            else:
                offered = role == Role.REPLICATE or Role.SEQUENCE not in roles
            wanted = Shard(axes[role]) if role in axes else Replicate()
            cost = sum(_cost(placement, wanted, size) for placement in current)
            if offered and cost < least:
                best, least = role, cost
        parts[best] *= size
        roles.append(best)
    return Roles(mesh, tuple(roles), parts)


def _tried(current: Placement, axes: TensorAxes) -> list[str]:
    """All roles that the layout has, the one that the query's placement says first."""
    offered = [Role.REPLICATE, *axes]
    for role, axis in axes.items():
        if current == Shard(axis):
            offered.remove(role)
            offered.insert(0, role)
    return offered


def _cost(current: Placement, wanted: Placement, size: int) -> float:
    """What each rank receives, in parts of the whole tensor."""
    if current in (wanted, Replicate()):
        return 0.0
    if isinstance(current, Partial):
        return 1.0 if isinstance(wanted, Shard) else 2.0
    # A _StridedShard is no Shard. PyTorch 2.12 cannot trace `type(current) is Shard`.
    return 1.0 / size if isinstance(current, Shard) and isinstance(wanted, Shard) else 1.0


def chunk_rows(seq_len: int, world: int) -> list[int]:
    """Rows of each rank where DTensor shards `seq_len` rows: full chunks first, what is left over, then none."""
    chunk = -(-seq_len // world)
    return [max(0, min(chunk, seq_len - rank * chunk)) for rank in range(world)]

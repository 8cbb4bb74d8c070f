"""Which load balancer PyTorch's context parallelism has used, and the shard map that it makes.

A balancer is a permutation p: row i of the rearranged sequence holds position p[i]; rank r gets the r-th equal part.

    head-tail, 8 positions on 2 ranks     p = 0 1 6 7 | 2 3 4 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.dtensor import private
from ringspan.dtensor.operands import MakeMap
from ringspan.shard_map import ShardMap

_EXCHANGES = {"ALL_TO_ALL": "all_to_all", "ALL_GATHER": "all_gather"}


@dataclass(frozen=True)
class KnownMap:
    """The one map that a balancer made: for its own length and number of ranks only."""

    smap: ShardMap

    def __call__(self, seq_len: int, world: int) -> ShardMap:
        """See `MakeMap`."""
        if (seq_len, world) != (self.smap.seq_len, self.smap.world_size):
            raise ValueError(
                f"the load balancer rearranged {self.smap.seq_len} positions for {self.smap.world_size} ranks, but the "
                f"attention has {seq_len} on {world}; shard its inputs with the same balancer"
            )
        return self.smap


def unknown_map(seq_len: int, world: int) -> ShardMap:
    """Refuses: rows are in an order that nobody has told."""
    raise NotImplementedError(
        "buffers were sharded with a load balancer before ringspan was told; call "
        "ringspan.enable_cp_dtensor_dispatcher() before _context_parallel_shard, or give it shard_map="
    )


class BalancerWatch:
    """Looks on while PyTorch shards buffers, until it is removed."""

    def __init__(self) -> None:
        self._module = private.context_parallel_module()
        self._before = (self._module._context_parallel_buffers, self._module._disable_cp_dtensor_dispatcher)
        self._make_map = self._map_of_before()
        self._module._context_parallel_buffers = self._shard_buffers
        self._module._disable_cp_dtensor_dispatcher = self._disable

    def split(self, enabled: MakeMap) -> tuple[MakeMap, str]:
        """The map and the exchange of a call now. `enabled`: the map where PyTorch has sharded nothing."""
        if self._make_map is None or (self._make_map is unknown_map and enabled is not ShardMap.contiguous):
            return enabled, "auto"
        return self._make_map, _EXCHANGES[self._module._cp_options.rotate_method.name]

    def forget(self) -> None:
        """What was sharded up to now counts no more."""
        self._make_map = None

    def remove(self) -> None:
        """PyTorch's functions as they were."""
        self._module._context_parallel_buffers, self._module._disable_cp_dtensor_dispatcher = self._before

    def _map_of_before(self) -> MakeMap | None:
        """What was sharded before anybody looked: a context manager that is open has used its default or none."""
        balanced = self._module._cp_options.enable_load_balance
        if private.is_inside_context_parallel():
            return ShardMap.head_tail if balanced else ShardMap.contiguous
        if self._module._dispatch_mode is self._module._DispatchMode.MODULE_WRAPPER:
            return unknown_map if balanced else ShardMap.contiguous
        return None

    def _shard_buffers(self, mesh: Any, buffers: Any, buffer_seq_dims: Any, load_balancer: Any = None) -> Any:
        shards = self._before[0](mesh, buffers, buffer_seq_dims, load_balancer)
        self._make_map = _map_of(load_balancer, self._module, mesh.size())
        return shards

    def _disable(self) -> None:
        self.forget()
        self._before[1]()


def _map_of(balancer: Any, module: Any, world: int) -> MakeMap:
    indices = None if balancer is None else balancer._generate_indices()
    if indices is None:
        return ShardMap.contiguous
    # int64 [1 or B, seq_len], the position of each row; ranks have equal parts.
    seq_len = indices.shape[1]
    rows = seq_len // world
    lists = [[_segments(part) for part in entry[: rows * world].view(world, rows)] for entry in indices.cpu()]
    smap = ShardMap.from_segments(lists, seq_len=seq_len, local_rows=[rows] * world)
    head_tail = ShardMap.head_tail(seq_len, world)
    if smap.num_lists == 1 and all(smap.segments(rank) == head_tail.segments(rank) for rank in range(world)):
        # By its rule rather than by its segments, so that traced code need not be traced again for each length.
        return ShardMap.head_tail
    return KnownMap(smap)


def _segments(positions: Tensor) -> list[tuple[int, int, int, int]]:
    """Runs of neighbours, as (local row, begin, length, stride)."""
    offsets, lengths = torch.unique_consecutive(positions - torch.arange(len(positions)), return_counts=True)
    rows = lengths.cumsum(0) - lengths
    runs = zip(rows.tolist(), (offsets + rows).tolist(), lengths.tolist(), strict=True)
    return [(row, position, length, 1) for row, position, length in runs]

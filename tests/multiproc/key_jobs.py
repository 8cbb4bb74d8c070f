"""Jobs of the pool about the keys that calls leave in the store."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from trials import EXACT, Arena

import ringspan as rs


def keys_after_refusals(
    group: dist.ProcessGroup, fresh: dist.ProcessGroup, times: int, peers_come: str
) -> dict[str, Any]:
    """How many keys of the odd rank the store holds after it has refused so often, and whether the next call is good.

    peers_come: "each time", or "later", all calls after all refusals.
    """
    arena = Arena(group, [fresh])
    assert arena.next_error() <= EXACT
    odd = arena.world - 1
    refused = 0

    def attempt(scale: float) -> int:
        try:
            rs.attention(*(torch.zeros(1, 1, 2, 4) for _ in range(3)), scale=scale, group=arena.group)
        except ValueError:
            return 1
        return 0

    for _ in range(times):
        if peers_come == "each time" or arena.rank == odd:
            refused += attempt(float("nan") if arena.rank == odd else 0.5)
        if peers_come == "each time":
            arena.share(None)  # else the odd rank, which waits for nobody, would be done before they come
    arena.share(None)
    if peers_come == "later" and arena.rank != odd:
        refused += sum(attempt(0.5) for _ in range(times))
    arena.share(None)
    kept = len(keys_of(arena, odd))
    error = arena.next_error()
    arena.share(None)
    return {"refused": refused, "kept": kept, "error": error, "kept after": len(keys_of(arena, odd))}


def keys_of(arena: Arena, rank: int) -> list[str]:
    """Keys of a rank's headers and descriptions in the store of the group."""
    store = dist.distributed_c10d._world.pg_map[arena.group][1]
    tails = tuple(f"/{topic}/{rank}" for topic in "hd")
    group = store.prefix if hasattr(store, "prefix") else ""
    return [key for key in store.list_keys() if "ringspan/" in key and group in key and key.endswith(tails)]

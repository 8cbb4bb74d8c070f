"""`ringspan.attention` on DTensors: local tensors in, the group that shares out the sequence, DTensors out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringspan.call import Given, Sizes
from ringspan.dtensor.arrangement import OPERANDS, Arrangement, Sharding, arrange, sharding_of
from ringspan.dtensor.operands import (
    as_dtensor,
    check_rows,
    common_mesh,
    in_place,
    local_parts,
    map_of,
    takes_part,
    wholes,
)
from ringspan.dtensor.placements import Role, Roles, axes_beside
from ringspan.dtensor.split import Split, split_in_effect
from ringspan.entry import Telling
from ringspan.group import LOCAL
from ringspan.numbers import check_sum
from ringspan.pairs import Alibi
from ringspan.plain import Shares, attend
from ringspan.shard_map import ShardMap
from ringspan.stats import Stats


def attend_on_dtensors(given: Given) -> Tensor | tuple[Tensor, Stats]:
    """See `ringspan.attention`: `given` are its arguments. The gradients of DTensors are DTensors too."""
    if given["group"] is not None:
        raise ValueError(
            f"group is {given['group']!r}, and the tensors are DTensors, whose mesh says who takes part; leave it out"
        )
    named = {name: given[name] for name in (*OPERANDS, "sink", "attn_mask", "bias")}
    if isinstance(given["bias"], Alibi):
        named["bias"] = given["bias"].slopes
    mesh = common_mesh(named)
    named = {name: tensor for name, tensor in named.items() if tensor is not None or name in OPERANDS}
    tensors = {name: as_dtensor(name, tensor, mesh) for name, tensor in named.items()}
    query, key, value = (tensors[name] for name in OPERANDS)
    arrangement = arrange(query, key, value, given["layout"], given["num_heads"])
    roles = arrangement.roles
    shardings = arrangement.operands | _shardings_of_others(tensors, given, roles)
    placed = [in_place(name, tensors[name], sharding) for name, sharding in shardings.items()]
    parts = dict(zip(shardings, local_parts(placed, list(shardings.values())), strict=True))
    group = roles.sequence_group() if takes_part(mesh) else None
    local = dict(given) | parts
    local |= _local_choices(given, arrangement, split_in_effect()) | _local_pairs(given, arrangement.sizes, parts)
    local["group"] = LOCAL if group is None else group
    if not takes_part(mesh):
        # As of any DTensor: an empty tensor.
        empty = local["query"]
        return _wrap_result((empty, Stats(*[empty] * 3)) if local["return_stats"] else empty, arrangement)
    batch_groups, head_groups = (tuple(roles.group_names(role)) for role in (Role.BATCH, Role.HEADS))
    shares = Shares(batch_groups, head_groups, roles.parts[Role.BATCH])
    if torch.compiler.is_compiling() or local["assume_agreed"]:
        return _wrap_result(attend(local, shares), arrangement)
    with Telling(local["group"]):
        return _wrap_result(attend(local, shares), arrangement)


def _local_choices(given: Given, arrangement: Arrangement, split: Split) -> dict[str, Any]:
    """What is chosen for the ranks that share the sequence: explicit maps, and this rank's number of heads."""
    sizes, parts = arrangement.sizes, arrangement.roles.parts
    chosen: dict[str, Any] = {}
    if given["num_heads"] is not None:
        chosen["num_heads"] = given["num_heads"] // parts[Role.HEADS]
    if Role.SEQUENCE not in arrangement.roles.roles:
        return chosen
    world = parts[Role.SEQUENCE]
    q_map = _map(given["shard_map"], sizes.q_rows, world, split)
    kv_map = given["kv_shard_map"] if given["kv_shard_map"] is not None else given["shard_map"]
    kv_map = q_map if kv_map is None and sizes.kv_rows == sizes.q_rows else _map(kv_map, sizes.kv_rows, world, split)
    chosen |= {"shard_map": q_map, "kv_shard_map": kv_map}
    # An all_gather is schedule gather's alone: a schedule that the caller names goes before PyTorch's rotater.
    if given["exchange"] == "auto" and (split.exchange != "all_gather" or given["schedule"] in ("auto", "gather")):
        chosen["exchange"] = split.exchange
    return chosen


def _map(given: ShardMap | None, rows: int, world: int, split: Split) -> ShardMap:
    return map_of(split.make_map, rows, world) if given is None else check_rows(given, rows, world)


def _shardings_of_others(tensors: dict[str, DTensor], given: Given, roles: Roles) -> dict[str, Sharding]:
    """Where sink, mask and bias lie, each by the axes that it has for itself."""
    found = {}
    for name, tensor in tensors.items():
        if name not in OPERANDS:
            axes = axes_beside(name, tensor, name == "bias" and isinstance(given["bias"], Alibi))
            found[name] = sharding_of(roles, axes, tensor.shape, tensor.dtype)
    return found


def _local_pairs(given: Given, sizes: Sizes, parts: dict[str, Tensor]) -> dict[str, Any]:
    """Masks and biases are this rank's parts; positions stay those of the whole call."""
    found: dict[str, Any] = {}
    if isinstance(given["bias"], Alibi):
        found["bias"] = replace(given["bias"], slopes=parts["bias"])
    if given["dropout_p"] > 0 and given["total_heads"] is None:
        heads = sizes.q_heads
        found["total_heads"] = check_sum("head_offset", given["head_offset"], "the number of query heads", heads)
    return found


def _wrap_result(result: Tensor | tuple[Tensor, Stats], arrangement: Arrangement) -> Tensor | tuple[Tensor, Stats]:
    out, stats = arrangement.out, arrangement.stats
    if isinstance(result, Tensor):
        return wholes([result], [out])[0]
    local, rows = result
    whole, lse = wholes([local, rows.lse], [out, stats])
    row_max, row_sum = wholes([rows.max, rows.sum], [stats, stats])
    return whole, Stats(row_max, row_sum, lse)

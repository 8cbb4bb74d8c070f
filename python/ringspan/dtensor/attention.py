"""`ringspan.attention` on DTensors: local tensors in, the group that shares out the sequence, DTensors out."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ringspan.attend import Request, Shares, attend
from ringspan.call import Choices, Sizes, check_choices
from ringspan.dtensor.operands import (
    Placed,
    check_rows,
    common_mesh,
    local_parts,
    map_of,
    read_operands,
    takes_part,
    wholes,
    wrap,
)
from ringspan.dtensor.placements import (
    SINK_AXES,
    Role,
    Roles,
    axes_of_layout,
    axes_of_pairs,
    axes_of_slopes,
    axes_of_stats,
    out_shape,
    stats_shape,
)
from ringspan.dtensor.split import Split, split_in_effect
from ringspan.group import Group
from ringspan.pairs import Alibi, PairChoices
from ringspan.shard_map import ShardMap
from ringspan.stats import Stats


def attend_on_dtensors(request: Request, group: Group) -> Tensor | tuple[Tensor, Stats]:
    """See `ringspan.attention`. The gradients of DTensors are DTensors too."""
    choices, pairs = request.choices, request.pairs
    check_choices(choices)
    pairs.check()
    _check_group(group)
    bias = pairs.bias.slopes if isinstance(pairs.bias, Alibi) else pairs.bias
    named = {
        "query": request.query, "key": request.key, "value": request.value,
        "sink": request.sink, "attn_mask": pairs.attn_mask, "bias": bias,
    }  # fmt: skip
    mesh = common_mesh(named)
    (q, k, v), sizes, roles = read_operands(named, mesh, choices.layout, choices.num_heads)
    split = split_in_effect()
    axes = axes_of_layout(choices.layout)
    placed = [("query", q, axes), ("key", k, axes), ("value", v, axes), ("sink", request.sink, SINK_AXES)]
    parts = local_parts(placed + _placed_pairs(pairs), roles)
    local = Request(
        parts["query"],
        parts["key"],
        parts["value"],
        parts["sink"],
        _local_choices(choices, sizes, roles, split),
        _local_pairs(pairs, sizes, parts),
        request.return_stats,
        request.assume_agreed,
    )
    if takes_part(mesh):
        names = (tuple(roles.group_names(role)) for role in (Role.BATCH, Role.HEADS))
        result = attend(local, roles.sequence_group(), Shares(*names, roles.parts(Role.BATCH)))
    else:
        result = _nothing(local)
    return _wrap_result(result, q, sizes, roles, choices.layout)


def _nothing(local: Request) -> Tensor | tuple[Tensor, Stats]:
    """What a rank outside the mesh has of the results, as of any DTensor: an empty tensor."""
    return (local.query, Stats(*[local.query] * 3)) if local.return_stats else local.query


def _check_group(group: Group) -> None:
    if group is not None:
        raise ValueError(
            f"group is {group!r}, and the tensors are DTensors, whose mesh says who takes part; leave it out"
        )


def _local_choices(choices: Choices, sizes: Sizes, roles: Roles, split: Split) -> Choices:
    """The choices for the ranks that share the sequence: explicit maps, and this rank's number of heads."""
    heads = None if choices.num_heads is None else choices.num_heads // roles.parts(Role.HEADS)
    world = roles.parts(Role.SEQUENCE)
    exchange = split.exchange if choices.exchange == "auto" else choices.exchange
    if Role.SEQUENCE not in roles.roles:
        return replace(choices, num_heads=heads)
    q_map = _map(choices.shard_map, sizes.q_rows, world, split)
    kv_map = choices.kv_shard_map if choices.kv_shard_map is not None else choices.shard_map
    kv_map = q_map if kv_map is None and sizes.kv_rows == sizes.q_rows else _map(kv_map, sizes.kv_rows, world, split)
    return replace(choices, num_heads=heads, shard_map=q_map, kv_shard_map=kv_map, exchange=exchange)


def _map(given: ShardMap | None, rows: int, world: int, split: Split) -> ShardMap:
    return map_of(split.make_map, rows, world) if given is None else check_rows(given, rows, world)


def _placed_pairs(pairs: PairChoices) -> list[Placed]:
    """Masks and biases, and the axes that each has for itself."""
    bias, mask = pairs.bias, pairs.attn_mask
    found: list[Placed] = [] if mask is None else [("attn_mask", mask, axes_of_pairs(mask.shape))]
    if isinstance(bias, Alibi):
        found.append(("bias", bias.slopes, axes_of_slopes(bias.slopes)))
    elif bias is not None:
        found.append(("bias", bias, axes_of_pairs(bias.shape)))
    return found


def _local_pairs(pairs: PairChoices, sizes: Sizes, parts: dict[str, Tensor | None]) -> PairChoices:
    """Masks and biases are this rank's parts; places stay those of the whole call."""
    bias = parts.get("bias")
    if isinstance(pairs.bias, Alibi):
        bias = replace(pairs.bias, slopes=bias)
    total = pairs.head_offset + sizes.q_heads if pairs.total_heads is None else pairs.total_heads
    return replace(pairs, attn_mask=parts.get("attn_mask"), bias=bias, total_heads=total)


def _wrap_result(
    result: Tensor | tuple[Tensor, Stats], query: Tensor, sizes: Sizes, roles: Roles, layout: str
) -> Tensor | tuple[Tensor, Stats]:
    out, stats = result if isinstance(result, tuple) else (result, None)
    parts = [(out, out_shape(query.shape, sizes, layout), axes_of_layout(layout))]
    if stats is None:
        return wholes(parts, roles)[0]
    rows, axes = stats_shape(sizes, layout), axes_of_stats(layout)
    whole, lse = wholes([*parts, (stats.lse, rows, axes)], roles)
    return whole, Stats(wrap(stats.max, rows, roles, axes), wrap(stats.sum, rows, roles, axes), lse)

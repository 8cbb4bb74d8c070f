"""`ringspan.attention` on DTensors: local tensors in, the group that shares out the sequence, DTensors out."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor

from ringspan.attend import Request, Shares, attend, check_arguments
from ringspan.call import Choices, Sizes
from ringspan.dtensor.arrangement import OPERANDS, Arrangement, Place, arrange, place_of
from ringspan.dtensor.operands import (
    as_dtensors,
    check_rows,
    common_mesh,
    in_place,
    local_parts,
    map_of,
    takes_part,
    wholes,
)
from ringspan.dtensor.placements import SINK_AXES, Role, Roles, axes_of_pairs, axes_of_slopes
from ringspan.dtensor.split import Split, split_in_effect
from ringspan.group import Group
from ringspan.pairs import Alibi, PairChoices
from ringspan.shard_map import ShardMap
from ringspan.stats import Stats


def attend_on_dtensors(request: Request, group: Group) -> Tensor | tuple[Tensor, Stats]:
    """See `ringspan.attention`. The gradients of DTensors are DTensors too."""
    choices, pairs = request.choices, request.pairs
    check_arguments(request)
    _check_group(group)
    bias = pairs.bias.slopes if isinstance(pairs.bias, Alibi) else pairs.bias
    named = {
        "query": request.query, "key": request.key, "value": request.value,
        "sink": request.sink, "attn_mask": pairs.attn_mask, "bias": bias,
    }  # fmt: skip
    mesh = common_mesh(named)
    given = as_dtensors(named, mesh)
    arrangement = arrange(given["query"], given["key"], given["value"], choices.layout, choices.num_heads)
    roles, split = arrangement.roles, split_in_effect()
    places = arrangement.operands | _places_of_others(given, pairs, roles)
    placed = [in_place(name, given[name], place) for name, place in places.items()]
    parts = dict(zip(places, local_parts(placed, list(places.values())), strict=True))
    local = Request(
        parts["query"],
        parts["key"],
        parts["value"],
        parts.get("sink"),
        _local_choices(choices, arrangement, split),
        _local_pairs(pairs, arrangement.sizes, parts),
        request.return_stats,
        request.assume_agreed,
    )
    if takes_part(mesh):
        names = (tuple(roles.group_names(role)) for role in (Role.BATCH, Role.HEADS))
        shares = Shares(*names, roles.parts[Role.BATCH])
        result = attend(local, roles.sequence_group(), shares, is_checked=True)
    else:
        result = _nothing(local)
    return _wrap_result(result, arrangement)


def _nothing(local: Request) -> Tensor | tuple[Tensor, Stats]:
    """What a rank outside the mesh has of the results, as of any DTensor: an empty tensor."""
    return (local.query, Stats(*[local.query] * 3)) if local.return_stats else local.query


def _check_group(group: Group) -> None:
    if group is not None:
        raise ValueError(
            f"group is {group!r}, and the tensors are DTensors, whose mesh says who takes part; leave it out"
        )


def _local_choices(choices: Choices, arrangement: Arrangement, split: Split) -> Choices:
    """The choices for the ranks that share the sequence: explicit maps, and this rank's number of heads."""
    sizes, parts = arrangement.sizes, arrangement.roles.parts
    heads = None if choices.num_heads is None else choices.num_heads // parts[Role.HEADS]
    if Role.SEQUENCE not in arrangement.roles.roles:
        return replace(choices, num_heads=heads)
    world = parts[Role.SEQUENCE]
    q_map = _map(choices.shard_map, sizes.q_rows, world, split)
    kv_map = choices.kv_shard_map if choices.kv_shard_map is not None else choices.shard_map
    kv_map = q_map if kv_map is None and sizes.kv_rows == sizes.q_rows else _map(kv_map, sizes.kv_rows, world, split)
    exchange = split.exchange if choices.exchange == "auto" else choices.exchange
    return Choices(choices.mask, q_map, kv_map, choices.layout, heads, choices.scale, choices.schedule, exchange)


def _map(given: ShardMap | None, rows: int, world: int, split: Split) -> ShardMap:
    return map_of(split.make_map, rows, world) if given is None else check_rows(given, rows, world)


def _places_of_others(given: dict[str, DTensor], pairs: PairChoices, roles: Roles) -> dict[str, Place]:
    """Where sink, mask and bias lie, each by the axes that it has for itself."""
    places = {}
    for name, tensor in given.items():
        if name in OPERANDS:
            continue
        if name == "sink":
            axes = SINK_AXES
        elif name == "bias" and isinstance(pairs.bias, Alibi):
            axes = axes_of_slopes(tensor)
        else:
            axes = axes_of_pairs(tensor.shape)
        places[name] = place_of(roles, axes, tensor.shape, tensor.dtype)
    return places


def _local_pairs(pairs: PairChoices, sizes: Sizes, parts: dict[str, Tensor | None]) -> PairChoices:
    """Masks and biases are this rank's parts; places stay those of the whole call."""
    if pairs.attn_mask is None and pairs.bias is None and pairs.dropout_p == 0:
        return pairs
    bias = parts.get("bias")
    if isinstance(pairs.bias, Alibi):
        bias = replace(pairs.bias, slopes=bias)
    total = pairs.head_offset + sizes.q_heads if pairs.total_heads is None else pairs.total_heads
    return replace(pairs, attn_mask=parts.get("attn_mask"), bias=bias, total_heads=total)


def _wrap_result(result: Tensor | tuple[Tensor, Stats], arrangement: Arrangement) -> Tensor | tuple[Tensor, Stats]:
    out, stats = arrangement.out, arrangement.stats
    if isinstance(result, Tensor):
        return wholes([result], [out])[0]
    local, rows = result
    whole, lse = wholes([local, rows.lse], [out, stats])
    return whole, Stats(*wholes([rows.max, rows.sum], [stats, stats]), lse)

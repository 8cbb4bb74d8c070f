"""`ringspan.attention` on DTensors: local tensors in, the group that shares out the sequence, DTensors out."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ringspan.attend import Request, Shares, attend
from ringspan.call import Choices, Sizes, check_choices, read_sizes
from ringspan.dtensor.operands import as_dtensor, check_rows, common_mesh, local_part, map_of, wrap
from ringspan.dtensor.placements import Role, Roles, axes_of_layout, axes_of_pairs, axes_of_stats, choose_roles
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
    q, k, v = (as_dtensor(name, named[name], mesh) for name in ("query", "key", "value"))
    sizes = read_sizes(q.shape, k.shape, v.shape, choices.layout, choices.num_heads)
    roles = choose_roles(mesh, [t.placements for t in (q, k, v)], sizes, choices.layout)
    split = split_in_effect()
    axes = axes_of_layout(choices.layout)
    local = Request(
        local_part("query", q, roles, axes),
        local_part("key", k, roles, axes),
        local_part("value", v, roles, axes),
        local_part("sink", request.sink, roles, {Role.HEADS: 0}),
        _local_choices(choices, sizes, roles, split),
        _local_pairs(pairs, sizes, roles),
        request.return_stats,
        request.assume_agreed,
    )
    shares = Shares(tuple(roles.group_names(Role.BATCH)), tuple(roles.group_names(Role.HEADS)), roles.parts(Role.BATCH))
    result = attend(local, roles.sequence_group(), shares)
    return _wrap_result(result, q, sizes, roles, choices.layout)


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


def _local_pairs(pairs: PairChoices, sizes: Sizes, roles: Roles) -> PairChoices:
    """Masks and biases cut as the roles say; places stay those of the whole call."""
    bias = pairs.bias
    if isinstance(bias, Alibi):
        axes = {Role.HEADS: bias.slopes.dim() - 1} | ({Role.BATCH: 0} if bias.slopes.dim() == 2 else {})
        bias = replace(bias, slopes=local_part("alibi slopes", bias.slopes, roles, axes))
    elif bias is not None:
        bias = local_part("bias", bias, roles, axes_of_pairs(bias.shape))
    mask = pairs.attn_mask
    if mask is not None:
        mask = local_part("attn_mask", mask, roles, axes_of_pairs(mask.shape))
    total = pairs.head_offset + sizes.q_heads if pairs.total_heads is None else pairs.total_heads
    return replace(pairs, attn_mask=mask, bias=bias, total_heads=total)


def _wrap_result(
    result: Tensor | tuple[Tensor, Stats], query: Tensor, sizes: Sizes, roles: Roles, layout: str
) -> Tensor | tuple[Tensor, Stats]:
    out, stats = result if isinstance(result, tuple) else (result, None)
    shape = list(query.shape)
    shape[-1] = sizes.v_dim * (sizes.q_heads if layout in ("BSH", "SBH") else 1)
    whole = wrap(out, shape, roles, axes_of_layout(layout))
    if stats is None:
        return whole
    rows = [sizes.q_rows, sizes.q_heads] if layout == "TND" else [sizes.batch, sizes.q_heads, sizes.q_rows]
    axes = axes_of_stats(layout)
    return whole, Stats(*(wrap(one, rows, roles, axes) for one in (stats.max, stats.sum, stats.lse)))

"""From the arguments of one call to what crosses the dispatcher: checked sizes, `spec` and `tables`.

Shared by `attention` (sizes of local shards) and `plan` (sizes of whole sequences).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ringspan.group import Group, world_mismatch
from ringspan.masks import Frame, Mask
from ringspan.names import LAYOUTS, MAX_HEAD_DIM, SPEC_VERSION, check_exchange, check_layout, check_schedule
from ringspan.numbers import check_in_accumulator, is_finite, is_whole, shown
from ringspan.shard_map import CONTIGUOUS, ShardMap


def _axis(layout: str, letter: str) -> int | None:
    return layout.index(letter) if letter in layout else None


# Batch, heads, rows (tokens); None = the layout has no such axis.
AXES = {
    layout: (_axis(layout, "B"), _axis(layout, "N"), layout.index("S" if "S" in layout else "T")) for layout in LAYOUTS
}

# The arguments of `attention` by name, as the caller gave them.
Given = Mapping[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of query, key and value once the layout is taken off. Rows are those of the tensors given."""

    batch: int
    q_heads: int
    kv_heads: int
    q_rows: int
    kv_rows: int
    qk_dim: int
    v_dim: int


def check_choices(given: Given) -> None:
    """Raises ValueError for an argument that is no tensor and wrong by itself, NotImplementedError for one not offered.

    Of `given` are read mask, shard_map, kv_shard_map, layout, scale, schedule and exchange.
    """
    mask = given["mask"]
    check_layout(given["layout"])
    if not isinstance(mask, Mask):
        name = getattr(mask, "__name__", "")
        what = f"is {name} itself; call it" if callable(mask) and name else f"is of {type(mask).__name__}; give a mask"
        raise ValueError(f"mask {what}, such as ringspan.causal()")
    for name in ("shard_map", "kv_shard_map"):
        if given[name] is not None and not isinstance(given[name], ShardMap):
            raise ValueError(f"{name} is of {type(given[name]).__name__}; give a ShardMap or None")
    if given["scale"] is not None:
        check_scale(given["scale"])
    check_schedule(given["schedule"])
    check_exchange(given["exchange"])


def check_scale(scale: Any) -> None:
    """Raises ValueError for what is no finite number."""
    if not is_finite(scale):
        raise ValueError(f"scale is {shown(scale)}; give a finite number, or None for 1/sqrt(head dim)")


def read_sizes(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], layout: str, num_heads: int | None
) -> Sizes:
    """Takes the three shapes apart by `layout`. Raises ValueError, with both values, where they do not fit together."""
    batch_axis, head_axis, row_axis = AXES[layout]
    shapes = {"query": query, "key": key, "value": value}
    for name, shape in shapes.items():
        if len(shape) != len(layout):
            raise ValueError(f"{name} has {len(shape)} dimensions, but layout {layout} needs {len(layout)}")
        if batch_axis is not None:
            _check_equal("batch size", name, shape[batch_axis], query[batch_axis])
    _check_equal("number of rows", "value", value[row_axis], key[row_axis], "key")
    if num_heads is not None and (not is_whole(num_heads) or not num_heads > 0):
        raise ValueError(f"num_heads is {shown(num_heads)}; give the number of query heads, at least 1")
    if head_axis is None:
        heads, dim, kv_heads, v_dim = _split_hidden(query[2], key[2], value[2], layout, num_heads)
    else:
        heads, dim, kv_heads, v_dim = query[head_axis], query[-1], key[head_axis], value[-1]
        _check_equal("head dim", "key", key[-1], dim)
        _check_equal("number of heads", "value", value[head_axis], kv_heads, "key")
        if num_heads is not None and num_heads != heads:
            raise ValueError(
                f"num_heads is {shown(num_heads)}, but query has {heads} heads in layout {layout}; leave it out"
            )
    batch = 1 if batch_axis is None else query[batch_axis]
    sizes = Sizes(batch, heads, kv_heads, query[row_axis], key[row_axis], dim, v_dim)
    _check_positive(sizes)
    return sizes


def resolve_scale(scale: float | None, qk_dim: int, dtype: torch.dtype = torch.float64) -> float:
    """1/sqrt(qk_dim) where none was given; a float in any case (a symbolic head dim becomes a constant).

    ValueError where the accumulator of tensors of `dtype` does not hold it.
    """
    if scale is None:
        return 1.0 / math.sqrt(int(qk_dim))
    check_in_accumulator("scale", scale, dtype)
    return float(scale)


def encode_local_call(
    sizes: Sizes, given: Given, world: int, batch: int | None = None
) -> tuple[list[int], list[Tensor]]:
    """`spec` and `tables` of a call whose sizes are those of one shard. `batch`: entries that the mask describes, where
    these are a part of them.

    Without maps the global lengths are the local ones times `world`: exact where all shards are equal; ranks with
    another length disagree in `spec`, which the agreement refuses on every rank.
    """
    q_map, kv_map = _maps(given, world, given["group"])
    q_len = sizes.q_rows * world if q_map is None else q_map.seq_len
    kv_len = sizes.kv_rows * world if kv_map is None else kv_map.seq_len
    if world == 1:
        for name, rows, smap in (("query", sizes.q_rows, q_map), ("key", sizes.kv_rows, kv_map)):
            if smap is not None and rows != smap.local_rows(0):
                raise ValueError(f"{name} has {rows} rows, but its map gives this rank {smap.local_rows(0)}")
    return _encode(sizes.batch if batch is None else batch, (q_len, kv_len), (q_map, kv_map), given["mask"], world)


def encode_global_call(sizes: Sizes, given: Given, world: int) -> tuple[list[int], list[Tensor]]:
    """`spec` and `tables` of a call whose sizes are those of the whole sequences."""
    q_map, kv_map = _maps(given, world)
    for name, rows, smap in (("query", sizes.q_rows, q_map), ("key", sizes.kv_rows, kv_map)):
        if smap is not None and rows != smap.seq_len:
            raise ValueError(f"{name} has {rows} positions, but its map splits {smap.seq_len}; give whole sequences")
    return _encode(sizes.batch, (sizes.q_rows, sizes.kv_rows), (q_map, kv_map), given["mask"], world)


Maps = tuple[ShardMap | None, ShardMap | None]  # of queries, of keys


def _maps(given: Given, world: int, group: Group | Literal[""] = "") -> Maps:
    """`group`: the one that has `world` ranks, "" where the number was given by itself."""
    q_map = given["shard_map"]
    kv_map = q_map if given["kv_shard_map"] is None else given["kv_shard_map"]
    for name, smap in (("shard_map", q_map), ("kv_shard_map", kv_map)):
        if smap is not None and smap.world_size != world:
            if group == "":
                raise ValueError(f"{name} splits over {smap.world_size} ranks, but world_size is {world}")
            raise world_mismatch(name, smap.world_size, group, world)
    return q_map, kv_map


def _encode(batch: int, lengths: tuple[int, int], maps: Maps, mask: Mask, world: int) -> tuple[list[int], list[Tensor]]:
    q_map, kv_map = maps
    for name, smap in (("shard_map", q_map), ("kv_shard_map", kv_map)):
        if smap is not None:
            _check_lists(name, smap.num_lists, batch)
    _check_lists("mask", mask.num_lists(), batch)
    tables: list[Tensor] = []
    q_words = [CONTIGUOUS, 0] if q_map is None else q_map.encode(tables)
    kv_words = q_words
    if kv_map is not q_map:
        kv_words = [CONTIGUOUS, 0] if kv_map is None else kv_map.encode(tables)
    words = mask.encode(Frame(*lengths, q_map is not None and kv_map is not None), tables)
    return [SPEC_VERSION, world, batch, *lengths, *q_words, *kv_words, *words], tables


def _check_lists(name: str, count: int, batch: int) -> None:
    if count not in (1, batch):
        raise ValueError(f"{name} describes {count} batch entries, but query has {batch}; give one for all, or {batch}")


def _check_equal(what: str, name: str, value: int, expected: int, other: str = "query") -> None:
    if value != expected:
        raise ValueError(f"{what} of {name} is {value}, but that of {other} is {expected}; they must agree")


def _split_hidden(
    q_hidden: int, k_hidden: int, v_hidden: int, layout: str, num_heads: int | None
) -> tuple[int, int, int, int]:
    if num_heads is None:
        raise ValueError(f"layout {layout} does not show the heads of a hidden size of {q_hidden}; give num_heads")
    if q_hidden % num_heads != 0 or q_hidden == 0:
        raise ValueError(f"query has a hidden size of {q_hidden}, which num_heads {shown(num_heads)} does not divide")
    dim = q_hidden // num_heads
    if k_hidden % dim != 0 or k_hidden == 0:
        raise ValueError(f"key has a hidden size of {k_hidden}, which the head dim {dim} of query does not divide")
    kv_heads = k_hidden // dim
    if v_hidden % kv_heads != 0:
        raise ValueError(f"value has a hidden size of {v_hidden}, which the {kv_heads} heads of key do not divide")
    return num_heads, dim, kv_heads, v_hidden // kv_heads


def _check_positive(sizes: Sizes) -> None:
    for name, value in (("batch entries", sizes.batch), ("query heads", sizes.q_heads), ("key heads", sizes.kv_heads)):
        if value < 1:
            raise ValueError(f"the number of {name} is {value}; it must be at least 1")
    for name, value in (("query and key", sizes.qk_dim), ("value", sizes.v_dim)):
        if not 1 <= value <= MAX_HEAD_DIM:
            raise ValueError(f"the head dim of {name} is {value}; it must be in 1..{MAX_HEAD_DIM}")
    if sizes.q_heads % sizes.kv_heads != 0:
        raise ValueError(
            f"query has {sizes.q_heads} heads, key has {sizes.kv_heads}; query heads must be a multiple of key heads"
        )

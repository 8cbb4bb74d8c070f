"""Attention on plain tensors, below the public functions: what these hand over has been read, and is checked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.call import Given, encode_local_call, read_sizes, resolve_scale
from ringspan.group import name_and_world
from ringspan.masks import Frame
from ringspan.names import AUTO, DEVICES, DTYPES
from ringspan.pairs import check_fits, encode_pairs
from ringspan.place import place_of_caller
from ringspan.schedules import schedule_of_call
from ringspan.stats import Stats
from ringspan.support import check_offered, device_refusal

OFFERED_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


@dataclass(frozen=True)
class Shares:
    """Which part of an undivided call this is: of its batch entries and of its heads, in equal parts.

    The groups say over which ranks they are spread, outermost first. Masks, places and totals are those of the
    undivided call.
    """

    batch_groups: tuple[str, ...] = ()
    head_groups: tuple[str, ...] = ()
    batch_parts: int = 1


WHOLE = Shares()


def attend(given: Given, shares: Shares = WHOLE) -> Tensor | tuple[Tensor, Stats]:
    """See `ringspan.attention`: `given` are its arguments, on plain tensors; those that are none were checked."""
    group_name, world = name_and_world(given["group"])
    query, key, value, layout = given["query"], given["key"], given["value"], given["layout"]
    check_tensors(query, key, value)
    if given["return_stats"]:
        refusal = device_refusal(query.device.type, ("return_stats",))
        if refusal:
            raise NotImplementedError(refusal)
    sizes = read_sizes(query.shape, key.shape, value.shape, layout, given["num_heads"])
    dtype = _dtype_of_call(query)
    _check_sink(given["sink"], query, sizes.q_heads)
    check_fits(given, dtype)
    scale = resolve_scale(given["scale"], sizes.qk_dim, dtype)
    spec, tables = encode_local_call(sizes, given, world, sizes.batch * shares.batch_parts)
    frame = Frame(spec[3], spec[4], given["shard_map"] is not None)
    options = encode_pairs(given, sizes, frame, dtype, query.device) | _options(given, group_name, shares)
    if given["assume_agreed"] and world > 1 and "seed_is_drawn" in options:
        raise ValueError("assume_agreed=True and seed=None: each rank would draw its own dropout; give all one seed")
    op = torch.ops.ringspan.attention
    out, row_max, row_sum, lse = op(query, key, value, spec, tables, scale, layout, sizes.q_heads, **options)
    return (out, Stats.of(layout, row_max, row_sum, lse)) if given["return_stats"] else out


def _options(given: Given, group_name: str | None, shares: Shares) -> dict[str, Any]:
    """Those keyword arguments of the op that are not about pairs and not its defaults."""
    options: dict[str, Any] = {}
    if group_name is not None:
        options["group_name"] = group_name
    if group_name:
        options["place"] = place_of_caller()
    if given["sink"] is not None:
        options["sink"] = given["sink"]
    schedule, exchange = schedule_of_call(given["schedule"], given["exchange"]), given["exchange"]
    if schedule != AUTO:
        options["schedule"] = schedule
    if exchange != AUTO:
        options["exchange"] = exchange
    for name in ("assume_agreed", "return_stats"):
        if given[name]:
            options[name] = True
    if given["shard_map"] is None and given["kv_shard_map"] is None and shares is WHOLE:
        options["map_is_default"] = True
    if shares.batch_groups:
        options["batch_groups"] = list(shares.batch_groups)
    if shares.head_groups:
        options["head_groups"] = list(shares.head_groups)
    return options


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError for what is no tensor or of another dtype or device, NotImplementedError for a device."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is of {type(tensor).__name__}; give a tensor")
        if tensor.dtype not in OFFERED_DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}; give one of {', '.join(DTYPES)}")
    device, dtype = query.device, query.dtype
    check_offered("device", device.type)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != device:
            raise ValueError(f"{name} lies on {tensor.device}, query on {device}; put them on one device")
        if tensor.dtype != dtype and _dtype_of_call(tensor) != _dtype_of_call(query):
            raise ValueError(f"{name} is of {tensor.dtype}, query of {query.dtype}; the three must be alike")


def _check_sink(sink: Tensor | None, query: Tensor, q_heads: int) -> None:
    if sink is None:
        return
    if not isinstance(sink, Tensor):
        raise ValueError(f"sink is of {type(sink).__name__}; give a tensor of one value per query head, or None")
    if sink.dim() != 1 or sink.shape[0] != q_heads:
        raise ValueError(f"sink has shape {list(sink.shape)}, but query has {q_heads} heads; give [{q_heads}]")
    wide = (torch.float32, torch.float64) if query.dtype == torch.float64 else (torch.float32,)
    if sink.dtype not in wide:
        raise ValueError(f"sink is of {sink.dtype}; give {' or '.join(str(dtype) for dtype in wide)}")
    if sink.device != query.device:
        raise ValueError(f"sink lies on {sink.device}, query on {query.device}; put them on one device")


def _dtype_of_call(tensor: Tensor) -> torch.dtype:
    """What the op computes in: autocast takes all but fp64 to its own dtype."""
    device = tensor.device.type if tensor.device.type in DEVICES else "cpu"
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype

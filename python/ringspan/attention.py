"""`attention`: exact attention over a sequence that is split over the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.call import Given, check_choices, encode_local_call, read_sizes, resolve_scale
from ringspan.entry import enters, has_dtensors
from ringspan.group import Group, name_and_world
from ringspan.masks import Frame, Full, Mask
from ringspan.numbers import check_flag
from ringspan.pairs import check_fits, check_pairs, encode_pairs
from ringspan.schedules import schedule_of_call
from ringspan.shard_map import ShardMap
from ringspan.stats import Stats
from ringspan.support import DEVICES, DTYPES, check_offered, check_on_device

OFFERED_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_FULL = Full()


@enters(takes_dtensors=True)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask = _FULL,
    shard_map: ShardMap | None = None,
    kv_shard_map: ShardMap | None = None,
    group: Group = None,
    layout: str = "BNSD",
    num_heads: int | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    bias: Any = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    offset: int = 0,
    head_offset: int = 0,
    batch_offset: int = 0,
    schedule: Any = "auto",
    exchange: str = "auto",
    return_stats: bool = False,
    assume_agreed: bool = False,
    total_heads: int | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """Softmax attention of this rank's queries over the keys and values of all ranks of `group`.

    query [B, N, Sq, Dqk], key [B, Nkv, Skv, Dqk], value [B, Nkv, Skv, Dv] (layout BNSD) are this rank's shards; also
    BSND, BSH and SBH (the last two need `num_heads`, the query heads), and TND, one batch entry without a batch axis.
    Nkv divides N. fp32, bf16, fp16 or fp64, alike; under autocast the autocast dtype. Returns this rank's
    [B, N, Sq, Dv] in the same layout and dtype, with `return_stats` also `Stats`. Differentiable once, in query, key,
    value, sink, a float attn_mask and a bias tensor.

    mask: which pairs take part, by global positions (`causal()`, `window(...)`, ...).
    shard_map: who holds which positions; None = contiguous and equal: the whole sequence is the local length times the
        number of ranks, and other lengths on another rank are refused. For lengths that the group does not divide, give
        ShardMap.contiguous(seq_len, world). kv_shard_map: the same for key and value; None = as `shard_map`.
    group: a ProcessGroup, a DeviceMesh of one axis, or None for one rank.
    scale: factor of q.k; None = 1/sqrt(Dqk).
    softcap: scores become softcap * tanh(score / softcap), before masks and biases.
    attn_mask: expands to [B, N, Sq, all keys]: rows are this rank's, in the order of the shard, columns are global
        positions. Bool: True takes part. Float: added to the scores; -inf masks. Beside `mask`: both must keep a pair.
    bias: `alibi(slopes)`, or a tensor like a float attn_mask. Gradients of masks and biases are this rank's part where
        ranks share elements.
    sink: [N] fp32 (fp64 also with fp64 tensors), one logit per query head that joins every row's softmax as a key whose
        value is 0; -inf = none. The statistics include it. Its gradient is this rank's part: sum it over the group.
    exchange: how messages are posted: "all_to_all" ("auto"), "p2p", or "all_gather", which is schedule "gather"'s alone
        ("auto" then is that).
    assume_agreed: skip the check that all ranks make the same call. A mismatch is then undefined.
    dropout_p: probability that a pair's weight becomes 0; the others are divided by 1 - dropout_p. Which pairs, depends
        on seed, offset and the pair's global index alone (docs/dropout.md), on no split, schedule or number of threads.
    seed: an int, an int64 tensor of one element (on the CPU), or None: drawn by PyTorch's default generator of group
        rank 0. offset: further calls of one seed take another one.
    head_offset, batch_offset, total_heads: the place of this call's heads and batch entries in an undivided call, so
        that tensor-parallel and data-parallel ranks draw what that call would; total_heads None = up to the last here.

    Raises ValueError for a bad argument and NotImplementedError for one that is not offered (docs/python.md has the
    table), both before anything is sent and on every rank; PeerError for a lost or stalled peer.
    """
    given = locals()
    check_pairs(given)
    check_choices(given)
    check_flag("return_stats", return_stats)
    check_flag("assume_agreed", assume_agreed)
    if has_dtensors(query, key, value, sink, attn_mask, bias):
        from ringspan.dtensor.attention import attend_on_dtensors

        return attend_on_dtensors(given)
    return attend(given)


# For fronts that are an entry themselves, so that one mistake is told once.
attention_inside = attention.__wrapped__


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
    """See `attention`: `given` are its arguments, on plain tensors; those that are none were checked."""
    group_name, world = name_and_world(given["group"])
    query, key, value, layout = given["query"], given["key"], given["value"], given["layout"]
    check_tensors(query, key, value)
    if given["return_stats"]:
        check_on_device(query.device.type, "return_stats")
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
    if given["sink"] is not None:
        options["sink"] = given["sink"]
    choices = {"schedule": schedule_of_call(given["schedule"], given["exchange"]), "exchange": given["exchange"]}
    options |= {name: choice for name, choice in choices.items() if choice != "auto"}
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

"""One call of attention on this process's own tensors: checks, the description that crosses the dispatcher, the op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.call import Choices, check_choices, encode_local_call, read_sizes, resolve_scale
from ringspan.group import Group, name_and_world, tell_peers
from ringspan.masks import Frame
from ringspan.pairs import PairChoices
from ringspan.stats import Stats
from ringspan.support import DEVICES, DTYPES, check_offered, check_on_device

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


@dataclass(frozen=True)
class Request:
    """The arguments of `ringspan.attention`, as the caller gave them."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None
    choices: Choices
    pairs: PairChoices
    return_stats: bool
    assume_agreed: bool


def check_arguments(request: Request) -> None:
    """Raises ValueError for an argument that is wrong by itself, NotImplementedError for one not offered."""
    request.pairs.check()
    check_choices(request.choices)


def attend(
    request: Request, group: Group, shares: Shares = WHOLE, is_checked: bool = False
) -> Tensor | tuple[Tensor, Stats]:
    """See `ringspan.attention`. is_checked: `check_arguments` has seen the arguments already."""
    group_name, world = name_and_world(group)
    query, key, value, choices, pairs = request.query, request.key, request.value, request.choices, request.pairs
    try:
        if not is_checked:
            check_arguments(request)
        check_tensors(query, key, value)
        if request.return_stats:
            check_on_device(query.device.type, "return_stats")
        sizes = read_sizes(query.shape, key.shape, value.shape, choices.layout, choices.num_heads)
        _check_sink(request.sink, query, sizes.q_heads)
        spec, tables = encode_local_call(sizes, choices, world, sizes.batch * shares.batch_parts)
        frame = Frame(spec[3], spec[4], choices.shard_map is not None)
        changes = pairs.encode(sizes, frame, _dtype_of_call(query), query.device)
        if request.assume_agreed and world > 1 and pairs.dropout_p > 0 and pairs.seed is None:
            raise ValueError(
                "assume_agreed=True and seed=None: each rank would draw its own dropout; give all one seed"
            )
    except (ValueError, NotImplementedError) as error:
        if not request.assume_agreed:
            tell_peers(group_name, error)
        raise
    out, row_max, row_sum, lse = torch.ops.ringspan.attention(
        query,
        key,
        value,
        request.sink,
        spec,
        tables,
        resolve_scale(choices.scale, sizes.qk_dim),
        choices.layout,
        sizes.q_heads,
        group_name,
        choices.schedule,
        choices.exchange,
        request.assume_agreed,
        batch_groups=list(shares.batch_groups),
        head_groups=list(shares.head_groups),
        **changes,
    )
    return (out, Stats.of(choices.layout, row_max, row_sum, lse)) if request.return_stats else out


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError for what is no tensor or of another dtype or device, NotImplementedError for a device."""
    named = (("query", query), ("key", key), ("value", value))
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is of {type(tensor).__name__}; give a tensor")
        if tensor.dtype not in OFFERED_DTYPES:
            raise ValueError(f"{name} is of {tensor.dtype}; give one of {', '.join(DTYPES)}")
        if tensor.device != query.device:
            raise ValueError(f"{name} lies on {tensor.device}, query on {query.device}; put them on one device")
    check_offered("device", query.device.type)
    for name, tensor in named:
        if _dtype_of_call(tensor) != _dtype_of_call(query):
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

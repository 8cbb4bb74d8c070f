"""What changes single pairs of query and key: boolean and float masks, a bias, ALiBi, a softcap, dropout.

The arguments of `attention` on the left, what crosses the dispatcher on the right:

    attn_mask (bool)           -> attn_mask
    attn_mask (float), bias    -> bias          their sum where both are given
    bias=alibi(slopes)         -> slopes, slope_shift
    softcap, dropout_p, ...    -> NUMBERS
    seed                       -> seed, seed_is_drawn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringspan.call import Given, Sizes
from ringspan.masks import Frame, checked_align, corner_of
from ringspan.numbers import (
    LARGEST,
    check_above_zero_in_accumulator,
    check_sum,
    check_whole,
    is_beyond_int64,
    is_finite,
    is_whole,
    shown,
)
from ringspan.support import check_offered


@dataclass(frozen=True)
class Alibi:
    """A bias that falls with the distance: -slope * |j - i|."""

    slopes: Tensor = field(compare=False)
    align: str | None


def alibi(slopes: Tensor, align: str | None = None) -> Alibi:
    """The bias -slopes[n] * |j - i| of head n (ALiBi, Press, Smith, Lewis 2021), without a tensor of that size.

    slopes: [N] or [B, N], float32 (float64 with float64 tensors), without gradient. i and j are global positions; where
    queries and keys differ in number and no shard maps give positions, `align` says which corner they share, as for
    `causal`. ValueError for other slopes, NotImplementedError where slopes require a gradient.
    """
    if not isinstance(slopes, Tensor) or slopes.dim() not in (1, 2) or not slopes.is_floating_point():
        given = f"{slopes.dtype} {list(slopes.shape)}" if isinstance(slopes, Tensor) else type(slopes).__name__
        raise ValueError(f"alibi(slopes={given}): give a float32 tensor of one value per query head, [N] or [B, N]")
    check_offered("alibi", slopes.requires_grad)
    return Alibi(slopes, checked_align("alibi", align))


@dataclass(frozen=True)
class Number:
    """A number of a call: what `attention` and its op have where it is not given, and its checks.

    check: raises ValueError for a value that is wrong by itself; fits: likewise, beside tensors of a dtype. Neither is
    asked about the default.
    """

    default: Any
    sent: float | int
    check: Callable[[str, Any], None]
    fits: Callable[[str, Any, torch.dtype], None] | None = None


def _check_softcap(name: str, value: Any) -> None:
    if not is_finite(value) or not value > 0:
        raise ValueError(f"{name} is {shown(value)}; give a finite number above 0, or None")


def _check_probability(name: str, value: Any) -> None:
    if not is_finite(value) or not 0 <= value < 1:
        raise ValueError(f"{name} is {shown(value)}; give a probability, at least 0 and below 1")


_CHECK_PLACE = partial(check_whole, least=0)
# By the names of `attention` and of its op. total_heads is completed by `_total_heads`.
NUMBERS = {
    "softcap": Number(None, 0.0, _check_softcap, check_above_zero_in_accumulator),
    "dropout_p": Number(0.0, 0.0, _check_probability),
    "offset": Number(0, 0, _CHECK_PLACE),
    "batch_offset": Number(0, 0, _CHECK_PLACE),
    "head_offset": Number(0, 0, _CHECK_PLACE),
    "total_heads": Number(None, 0, partial(check_whole, least=1, ends=", or None")),
}


def complete_numbers(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of a call, those that were not given as `attention` has them. TypeError for a name that is none."""
    for name in given:
        if name not in NUMBERS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {name: given.get(name, number.default) for name, number in NUMBERS.items()}


def check_pairs(given: Given) -> None:
    """Raises ValueError for an argument that is wrong by itself; what `given` lacks is not looked at."""
    attn_mask, bias = given["attn_mask"], given["bias"]
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise ValueError(f"attn_mask is of {type(attn_mask).__name__}; give a bool or float tensor or None")
    if bias is not None and not isinstance(bias, Tensor | Alibi):
        raise ValueError(f"bias is of {type(bias).__name__}; give a tensor, alibi(slopes) or None")
    if isinstance(bias, Tensor) and not bias.is_floating_point():
        raise ValueError(f"bias is of {bias.dtype}; give a float tensor (a bool mask goes to attn_mask)")
    for name, number in NUMBERS.items():
        value = given.get(name, number.default)
        if value is not number.default:
            number.check(name, value)
    _check_seed(given.get("seed"))


def check_fits(given: Given, dtype: torch.dtype) -> None:
    """Raises ValueError for a number that the accumulator of tensors of `dtype` does not hold."""
    for name, number in NUMBERS.items():
        if number.fits is not None and given[name] is not number.default:
            number.fits(name, given[name], dtype)


def encode_pairs(given: Given, sizes: Sizes, frame: Frame, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The keyword arguments of the op that are not its defaults. `sizes`: of this rank; `frame`: global lengths.

    ValueError where a tensor or a number does not fit them.
    """
    sent: dict[str, Any] = {}
    for name, number in NUMBERS.items():
        value = given[name]
        if value is not number.default and value != number.sent:
            sent[name] = float(value) if isinstance(number.sent, float) else value
    sent["total_heads"] = _total_heads(given, sizes)
    _add_tensors(sent, given, sizes, frame, dtype, device)
    if "dropout_p" in sent:
        sent["seed"] = _seed_tensor(given["seed"], device)
        if given["seed"] is None:
            sent["seed_is_drawn"] = True
    return sent


def _add_tensors(
    sent: dict[str, Any], given: Given, sizes: Sizes, frame: Frame, dtype: torch.dtype, device: torch.device
) -> None:
    """Adds masks, biases and slopes to `sent`."""
    attn_mask, bias = given["attn_mask"], given["bias"]
    if attn_mask is None and bias is None:
        return
    full = (sizes.batch, sizes.q_heads, sizes.q_rows, frame.kv_len)
    for name, one in (("attn_mask", attn_mask), ("bias", bias)):
        if isinstance(one, Tensor):
            fitted = _fitted(name, one, full, dtype, device)
            if one.dtype == torch.bool:
                sent["attn_mask"] = fitted
            else:
                sent["bias"] = sent["bias"] + fitted if "bias" in sent else fitted
    if isinstance(bias, Alibi):
        sent["slopes"] = _fitted_slopes(bias.slopes, sizes, dtype, device)
        if corner_of("alibi", bias.align, frame) != 1:
            sent["slope_shift"] = frame.q_len - frame.kv_len


def _check_seed(seed: Any) -> None:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(f"seed is {seed.dtype} {list(seed.shape)}; give one int64, an int or None")
    elif seed is not None and (not is_whole(seed) or is_beyond_int64(seed)):
        raise ValueError(f"seed is {shown(seed)}; give an int of 64 bits, an int64 tensor of one element, or None")


def _seed_tensor(seed: Tensor | int | None, device: torch.device) -> Tensor:
    if seed is None:
        # By the default generator, in the graph: a compiled graph draws anew each time, and a checkpoint that keeps
        # the generator's state draws the same again.
        return torch.randint(LARGEST, (1,), dtype=torch.int64)
    if not isinstance(seed, Tensor):
        return torch.full((1,), seed, dtype=torch.int64)
    if seed.device.type not in ("cpu", device.type if device.type == "meta" else "cpu"):
        raise ValueError(f"seed lies on {seed.device}, query on {device}; give a seed on the CPU")
    return seed.reshape(1)


def _total_heads(given: Given, sizes: Sizes) -> int:
    """The heads by which dropout counts; those of query where there is none."""
    end = check_sum("head_offset", given["head_offset"], "the number of query heads", sizes.q_heads)
    check_sum("batch_offset", given["batch_offset"], "the number of batch entries", sizes.batch)
    if given["dropout_p"] == 0:
        return sizes.q_heads
    total = given["total_heads"]
    if total is None:
        # The first batch entry needs no total: its heads are counted from 0.
        if given["head_offset"] > 0 and (sizes.batch > 1 or given["batch_offset"] > 0):
            raise ValueError(
                f"head_offset is {given['head_offset']} and total_heads is not given; with {sizes.batch} batch entries "
                f"from {given['batch_offset']} on, say how many heads the undivided call has (total_heads=)"
            )
        return end
    if total < end:
        raise ValueError(f"total_heads is {total}, but this call's heads end at {end}")
    return total


def _fitted(name: str, given: Tensor, full: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`given` where it expands to `full`; shared columns are expanded here, so that their gradient is summed up."""
    wide = (torch.float32, torch.float64) if dtype == torch.float64 else (torch.float32, torch.bfloat16, torch.float16)
    if given.dtype != torch.bool and given.dtype not in wide:
        raise ValueError(f"{name} is of {given.dtype}; give {', '.join(str(one) for one in wide)}")
    if given.device != device:
        raise ValueError(f"{name} lies on {given.device}, query on {device}; put them on one device")
    shape = given.shape
    fits = 0 < len(shape) <= 4 and all(
        size in (1, want) for size, want in zip(shape, full[4 - len(shape) :], strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {list(shape)}, which does not expand to {list(full)}: batch, query heads, this rank's "
            "query rows, all key positions"
        )
    return given.expand(*shape[:-1], full[3]) if shape[-1] != full[3] else given


def _fitted_slopes(slopes: Tensor, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    if tuple(slopes.shape) not in ((sizes.q_heads,), (sizes.batch, sizes.q_heads)):
        raise ValueError(
            f"alibi slopes have shape {list(slopes.shape)}, but query has {sizes.q_heads} heads in {sizes.batch} batch "
            f"entries; give [{sizes.q_heads}] or [{sizes.batch}, {sizes.q_heads}]"
        )
    if slopes.dtype not in ((torch.float32, torch.float64) if dtype == torch.float64 else (torch.float32,)):
        raise ValueError(f"alibi slopes are of {slopes.dtype}; give torch.float32")
    if slopes.device != device:
        raise ValueError(f"alibi slopes lie on {slopes.device}, query on {device}; put them on one device")
    return slopes

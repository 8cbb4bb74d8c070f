"""What the functions of this package accept. Everything else is a ValueError with both values in its message."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

# The type in which a sum over many keys is kept: 16-bit sums would lose digits with every key.
ACCUMULATOR = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

Statistics = tuple[Tensor, Tensor, Tensor]


def check_size(name: str, value: Any) -> int:
    """Returns `value` as an int. ValueError where it is not a whole number of at least 1 (bool is none)."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; give a whole number >= 1")
    return int(value)


def check_divides(cp_size: int, sequence_length: int) -> int:
    """Returns the length of a part. ValueError where equal parts would leave positions over."""
    local_length, left_over = divmod(sequence_length, cp_size)
    if left_over:
        raise ValueError(
            f"sequence_length {sequence_length} is not a multiple of cp_size {cp_size}: {left_over} left over; "
            "give a length that cp_size divides"
        )
    return local_length


def check_tensor(name: str, value: Any) -> None:
    """ValueError where `value` is no tensor with a sequence axis, which is the last but one."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; give a torch.Tensor")
    if value.dim() < 2:
        raise ValueError(f"{name} has shape {list(value.shape)}; give at least 2 axes, [..., sequence, features]")


def check_float(name: str, value: Any) -> None:
    """ValueError where `value` is no tensor of floating point numbers that can be computed with."""
    check_tensor(name, value)
    if value.dtype not in ACCUMULATOR:
        raise ValueError(f"{name} has dtype {value.dtype}; give float16, bfloat16, float32 or float64")


def check_finite(name: str, value: Tensor) -> None:
    """ValueError where `value` holds nan or an infinity, or where a result has left the range of its dtype."""
    if not torch.isfinite(value).all():
        worst = value.detach()[~torch.isfinite(value)][0].item()
        raise ValueError(f"{name} holds {worst} (dtype {value.dtype}); all of it must be finite and within that range")


def check_below_infinity(name: str, value: Tensor) -> None:
    """ValueError where `value` holds nan or +inf. -inf is allowed: it stands for a key that is masked."""
    if torch.isnan(value).any() or torch.isposinf(value).any():
        worst = "nan" if torch.isnan(value).any() else "inf"
        raise ValueError(f"{name} holds {worst}; give finite numbers, or -inf where a key is masked")


def check_same_dtype(first_name: str, first: Tensor, second_name: str, second: Tensor) -> None:
    """ValueError where two tensors would have to be converted before they can meet."""
    if first.dtype != second.dtype:
        raise ValueError(f"{first_name} has dtype {first.dtype}, but {second_name} has {second.dtype}; give one dtype")


def check_same_size(first_name: str, first: Tensor, second_name: str, second: Tensor, dims: tuple[int, int]) -> None:
    """ValueError where axis dims[0] of `first` and axis dims[1] of `second` count different things."""
    if first.shape[dims[0]] != second.shape[dims[1]]:
        raise ValueError(
            f"{first_name} has shape {list(first.shape)} and {second_name} {list(second.shape)}: axis {dims[0]} of the "
            f"first is {first.shape[dims[0]]}, axis {dims[1]} of the second {second.shape[dims[1]]}; they must be equal"
        )


def check_leading(first_name: str, first: Tensor, second_name: str, second: Tensor) -> None:
    """ValueError where the batch axes (all but the last two) do not broadcast against each other."""
    try:
        torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{first_name} has batch axes {list(first.shape[:-2])}, but {second_name} has {list(second.shape[:-2])}; "
            "give equal ones, or 1 where one side serves many"
        ) from None


def check_statistics(name: str, statistics: Any) -> Statistics:
    """Returns `statistics`. ValueError where it is no (maximum, denominator, numerator) of one part of the keys."""
    if not isinstance(statistics, tuple | list) or len(statistics) != 3:
        kind = f"{len(statistics)} items" if isinstance(statistics, tuple | list) else type(statistics).__name__
        raise ValueError(f"{name} is {kind}; give three tensors: maximum, denominator, numerator")
    maximum, denominator, numerator = statistics
    for part, tensor in (("maximum", maximum), ("denominator", denominator), ("numerator", numerator)):
        check_float(f"{part} of {name}", tensor)
        check_same_dtype(f"{part} of {name}", tensor, f"maximum of {name}", maximum)
    rows = maximum.shape
    wide = list(numerator.shape[:-1])
    if rows[-1] != 1 or denominator.shape != rows or not _reaches(rows[:-1], wide):
        raise ValueError(
            f"{name} has shapes {[list(tensor.shape) for tensor in statistics]}; give [..., rows, 1], [..., rows, 1] "
            "and [..., rows, Dv] with equal rows"
        )
    check_below_infinity(f"maximum of {name}", maximum)
    check_finite(f"denominator of {name}", denominator)
    check_finite(f"numerator of {name}", numerator)
    if (denominator < 0).any():
        raise ValueError(f"denominator of {name} holds {denominator.min().item()}; a sum of exponentials is never < 0")
    if ((maximum == -torch.inf) & (denominator != 0)).any() or ((maximum == -torch.inf) & (numerator != 0)).any():
        raise ValueError(f"{name} has maximum -inf, but a denominator or numerator other than 0; an empty part has 0")
    return maximum, denominator, numerator


def _reaches(narrow: torch.Size, wide: list[int]) -> bool:
    try:
        return list(torch.broadcast_shapes(narrow, tuple(wide))) == wide and narrow[-1] == wide[-1]
    except RuntimeError:
        return False

"""Checks of single numbers, and how a value is shown in an error."""

from __future__ import annotations

import sys
from typing import Any

import torch

LARGEST = 2**63 - 1  # what crosses the dispatcher: int64
_MANY_BITS = 256
# The accumulators: what is finite in Python can be infinite, or 0, in there.
_FP32 = torch.finfo(torch.float32)


def shown(value: Any) -> str:
    """Its repr; of a number of hundreds of digits its size (Python refuses to print thousands of them)."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _MANY_BITS:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def is_whole(value: Any) -> bool:
    """Whether it is an int, in traced code perhaps a symbol; True is no number."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def is_beyond_int64(value: Any) -> bool:
    """Whether a whole number does not cross the dispatcher. A symbol of traced code always does, and a comparison would
    bind it.
    """
    return isinstance(value, int) and not torch.compiler.is_compiling() and not -LARGEST - 1 <= value <= LARGEST


def check_whole(what: str, value: Any, least: int, ends: str = "") -> None:
    """Raises ValueError for what is no whole number of int64 of at least `least`. `ends`: more advice."""
    if not is_whole(value) or value < least:
        raise ValueError(f"{what} is {shown(value)}; give a whole number >= {least}{ends}")
    if is_beyond_int64(value):
        raise ValueError(f"{what} is {shown(value)}; give a whole number up to 2**63 - 1{ends}")


def is_finite(value: Any) -> bool:
    """Whether it is a number that a double holds. By comparisons: traced code may hold a symbol here."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def check_in_accumulator(what: str, value: float, dtype: torch.dtype) -> None:
    """Raises ValueError where the accumulator of tensors of `dtype` holds the finite `value` as an infinity."""
    if dtype != torch.float64 and not -_FP32.max <= value <= _FP32.max:
        raise ValueError(f"{what} is {shown(value)}, which is infinite in fp32, in which {dtype} is summed up")


def check_above_zero_in_accumulator(what: str, value: float, dtype: torch.dtype) -> None:
    """Raises ValueError where the accumulator holds `value`, above 0, as infinity or 0."""
    check_in_accumulator(what, value, dtype)
    least = sys.float_info.min if dtype == torch.float64 else _FP32.smallest_normal
    if value < least:
        name = "fp64" if dtype == torch.float64 else "fp32"
        raise ValueError(f"{what} is {value!r}, too small for {name}; give at least {least}")


def check_flag(what: str, value: Any) -> None:
    """Raises ValueError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {shown(value)}; give True or False")


def check_sum(name: str, value: int, other_name: str, other: int) -> int:
    """The sum of two whole numbers; ValueError where it is beyond int64."""
    total = value + other
    if is_beyond_int64(total):
        raise ValueError(f"{name} is {value} and {other_name} is {other}; their sum must be below 2**63")
    return total

"""Names and limits, from the tables of the C++ core: each is written there and nowhere else."""

from __future__ import annotations

import re

import torch

import ringspan._library  # noqa: F401  defines the ops

_NAMES = torch.ops.ringspan._names()
_LIMITS = torch.ops.ringspan._limits()

AUTO = "auto"
SCHEDULES = (AUTO, *_NAMES["schedules"])  # without numbers
SPLIT_SCHEDULES = tuple(_NAMES["split_schedules"])  # followed by numbers of ranks: "hybrid:4" or "hybrid:4x2"
EXCHANGES = (AUTO, *_NAMES["exchanges"])
LAYOUTS = tuple(_NAMES["layouts"])
DTYPES = tuple(_NAMES["long_dtypes"])
DTYPE_NAMES = {getattr(torch, long): short for long, short in zip(DTYPES, _NAMES["dtypes"], strict=True)}
DEVICES = ("cpu", "cuda", "npu")

# By code, in the words that cross the dispatcher; operators of masks follow the masks.
MAPS = tuple(_NAMES["maps"])
MASK_CODES = {name: code for code, name in enumerate((*_NAMES["masks"], "and", "or"))}
PLAIN_MAPS = tuple(_NAMES["plain_maps"])  # that need nothing but a length, a number of ranks and a mask

MAX_HEAD_DIM: int = _LIMITS["head_dim"]
STAT_SLOTS: int = _LIMITS["stat_slots"]  # equal numbers for each row of an npu op's statistics
SPEC_VERSION: int = _LIMITS["spec_version"]

_SPLIT = re.compile(rf"({'|'.join(SPLIT_SCHEDULES)}):[1-9]\d*(x[1-9]\d*)?")


def check_schedule(schedule: object) -> None:
    """Raises ValueError for what is no schedule."""
    if isinstance(schedule, str) and (schedule in SCHEDULES or _SPLIT.fullmatch(schedule)):
        return
    numbered = ", ".join(f"{name}:N" for name in SPLIT_SCHEDULES)
    raise ValueError(f"schedule is {schedule!r}; give one of {', '.join(SCHEDULES)}, {numbered}")


def check_exchange(exchange: object) -> None:
    """Raises ValueError for what is no exchange."""
    _check_one_of("exchange", exchange, EXCHANGES)


def check_layout(layout: object) -> None:
    """Raises ValueError for what is no layout."""
    _check_one_of("layout", layout, LAYOUTS)


def _check_one_of(what: str, given: object, offered: tuple[str, ...]) -> None:
    if not isinstance(given, str) or given not in offered:
        raise ValueError(f"{what} is {given!r}; give one of {', '.join(offered)}")


def name_of_dtype(dtype: torch.dtype) -> str:
    """What the library calls it. ValueError where it has no such tensors."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {dtype}; give one of {', '.join(DTYPES)}")
    return DTYPE_NAMES[dtype]

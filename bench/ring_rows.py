"""Rows that two processes of one thread each run together.

ring/...       our ring by all_to_all and by p2p, our single process with two threads, and PyTorch's ring, in turns
schedules/...  every schedule that two ranks can follow, by all_to_all and some by p2p, in turns with the ring
agreement/...  what it costs that the ranks compare their calls before anything is sent
memory/...     memory of a rank beyond inputs and outputs
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ranks import run_on_ranks
from settings import Settings
from shapes import Case

_DIRECTIONS = ("forward", "forward_backward")


def names(settings: Settings) -> list[str]:
    """All rows."""
    agreement = [f"agreement/{exchange}" for exchange in ("all_to_all", "p2p")]
    memory = [f"memory/{exchange}/{direction}" for exchange in ("all_to_all", "p2p") for direction in _DIRECTIONS]
    return [*ring_cases(settings), *schedule_cases(settings), *agreement, *memory]


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Starts the ranks if there is anything for them, and yields each row's result."""
    if selected:
        yield from run_on_ranks(list(selected), settings)


def ring_cases(settings: Settings) -> dict[str, Case]:
    """The problem of each row ring/...; `backward` means forward and backward together."""
    lengths = (256,) if settings.quick else (1024, 4096)
    dims = (64,) if settings.quick else (64, 128)
    shapes = itertools.product(("fp32", "bf16"), lengths, dims, ("full", "causal"), _DIRECTIONS)
    return {
        f"ring/{dtype}/{direction}/{mask}/S{seq_len}/D{head_dim}": Case(
            dtype, mask, seq_len, head_dim, backward=direction == "forward_backward"
        )
        for dtype, seq_len, head_dim, mask, direction in shapes
    }


def schedule_cases(settings: Settings) -> dict[str, Case]:
    """The problem of each row schedules/...; `backward` means forward and backward together."""
    seq_len = 256 if settings.quick else 4096
    dims = (64,) if settings.quick else (64, 128)
    shapes = itertools.product(("fp32", "bf16"), _DIRECTIONS, ("full", "causal", "window", "documents"), dims)
    return {
        f"schedules/{dtype}/{direction}/{mask}/S{seq_len}/D{head_dim}": Case(
            dtype, mask, seq_len, head_dim, backward=direction == "forward_backward"
        )
        for dtype, direction, mask, head_dim in shapes
    }

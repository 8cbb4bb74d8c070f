"""The problems of the rows of ring_rows.py, by name, for the process that lists them and for the ranks."""

from __future__ import annotations

import itertools

from settings import Settings
from shapes import Case

DIRECTIONS = ("forward", "forward_backward")


def ring_cases(settings: Settings) -> dict[str, Case]:
    """The problem of each row ring/...; `backward` means forward and backward together."""
    lengths = (256,) if settings.quick else (1024, 4096)
    dims = (64,) if settings.quick else (64, 128)
    shapes = itertools.product(("fp32", "bf16"), lengths, dims, ("full", "causal"), DIRECTIONS)
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
    shapes = itertools.product(("fp32", "bf16"), DIRECTIONS, ("full", "causal", "window", "documents"), dims)
    return {
        f"schedules/{dtype}/{direction}/{mask}/S{seq_len}/D{head_dim}": Case(
            dtype, mask, seq_len, head_dim, backward=direction == "forward_backward"
        )
        for dtype, direction, mask, head_dim in shapes
    }

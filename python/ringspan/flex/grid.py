"""Functions of one pair (b, h, q, kv), evaluated on a grid of pairs.

A mod is written for one pair, and `torch.vmap` is what runs such a function on many: the values are those of one call
for each pair, whatever the function does with its indices, and a branch on an index is refused instead of decided once
for all. Where the function does not look at an index, the result has one element along it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Pairs that are evaluated at once: 32 MiB for an intermediate in int64, and few enough calls that their overhead
# (about a millisecond) does not count.
PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Grid:
    """The pairs of all batch entries and heads at some queries and keys, by global positions.

    q: int64 [R], or [B, R] where batch entries hold other positions. kv: int64 [C]. At least one of each: vmap has no
    grid without pairs.
    """

    batch: int
    heads: int
    q: Tensor
    kv: Tensor


@dataclass(frozen=True)
class Pairs:
    """The pairs of a call. rows: global positions of this rank's queries, [R] or [B, R]."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    rows: Tensor

    def grid(self, q: Tensor) -> Grid:
        """All keys, at the queries q."""
        return Grid(self.batch, self.heads, q, torch.arange(self.kv_len))


def on_grid(function: Callable, grid: Grid) -> tuple[Tensor, ...]:
    """The tensors that `function(b, h, q, kv)` returns for one pair, for all: each [B or 1, N or 1, R or 1, C or 1]."""
    q_axis = 0 if grid.q.dim() == 2 else None
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, q_axis, None)):
        function = torch.vmap(function, in_dims=axes)
    with _IndexByTensors():
        found = function(torch.arange(grid.batch), torch.arange(grid.heads), grid.q, grid.kv)
    return tuple(_unexpanded(tensor) for tensor in found)


def row_chunks(num_rows: int, pairs_per_row: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """Runs of rows [begin, end) of at most `PAIRS_AT_ONCE` pairs and `most_rows` rows, but at least one row."""
    step = max(1, min(most_rows, PAIRS_AT_ONCE // max(1, pairs_per_row)))
    for begin in range(0, num_rows, step):
        yield begin, min(begin + step, num_rows)


def _unexpanded(tensor: Tensor) -> Tensor:
    """One element along each axis that vmap only repeated (stride 0)."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


class _IndexByTensors(TorchFunctionMode):
    """`table[q_idx]` by the value of q_idx for every pair; plain indexing by a scalar tensor would want one number."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            places = index if isinstance(index, tuple) else (index,)
            if all(isinstance(place, Tensor | int) and not isinstance(place, bool) for place in places):
                indices = [place if isinstance(place, Tensor) else torch.tensor(place) for place in places]
                return torch.ops.aten.index(table, indices)
        return func(*args, **(kwargs or {}))

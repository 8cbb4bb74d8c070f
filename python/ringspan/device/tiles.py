"""From the tiles of a step to calls of an accelerator's op: which rows, which columns, and which pairs of these.

A tile keeps row a and column c where lo <= kv_pos(c) - q_pos(a) <= hi. With equal strides that is a band of local
indices, low <= c - a <= high, which accelerators know; with others it is written out as a mask. Six rows and four
columns, high 0, low open, and the same with unequal strides (2 rows apart, 3 columns apart):

    x . . .      x . . .
    x x . .      x . . .
    x x x .      x x . .
    x x x x      x x x .
    x x x x      x x x .
    x x x x      x x x x
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

COMPRESSED = 2048  # rows and columns of the mask that modes 2, 3 and 4 want, whatever the lengths
_ROWS_OF_A_MASK = 1024  # rows that one written mask has at most: 1 KiB for each column


@dataclass(frozen=True)
class Tile:
    """One piece of a plan's work, as `ringspan/mask/tile.h` has it, for `batches` batch entries from `batch` on."""

    batch: int
    q_row0: int
    q_rows: int
    q_pos0: int
    q_stride: int
    kv_row0: int
    kv_rows: int
    kv_pos0: int
    kv_stride: int
    lo: int
    hi: int
    batches: int = 1

    def band(self) -> tuple[int, int] | None:
        """(low, high) of column - row, cut to what the sizes allow; None where the strides differ."""
        if self.q_stride != self.kv_stride:
            return None
        shift = self.kv_pos0 - self.q_pos0
        low = -((shift - self.lo) // self.q_stride)
        high = (self.hi - shift) // self.q_stride
        return max(low, 1 - self.q_rows), min(high, self.kv_rows - 1)

    def has_empty_rows(self) -> bool:
        """Whether a row may keep nothing. Plans hold such tiles only where the strides differ."""
        band = self.band()
        return band is None or not (band[0] <= band[1] and band[1] >= 0 and self.q_rows + band[0] <= self.kv_rows)

    def keep(self, device: torch.device | None = None) -> Tensor:
        """Bool [q_rows, kv_rows]: True takes part."""
        q = self.q_pos0 + self.q_stride * torch.arange(self.q_rows, device=device)
        kv = self.kv_pos0 + self.kv_stride * torch.arange(self.kv_rows, device=device)
        apart = kv[None, :] - q[:, None]
        return (self.lo <= apart) & (apart <= self.hi)

    def part(self, q_begin: int, q_end: int, kv_begin: int, kv_end: int) -> Tile:
        """The rows [q_begin, q_end) and columns [kv_begin, kv_end) of this tile."""
        return replace(
            self,
            q_row0=self.q_row0 + q_begin,
            q_rows=q_end - q_begin,
            q_pos0=self.q_pos0 + q_begin * self.q_stride,
            kv_row0=self.kv_row0 + kv_begin,
            kv_rows=kv_end - kv_begin,
            kv_pos0=self.kv_pos0 + kv_begin * self.kv_stride,
        )


def read_tiles(table: Tensor) -> list[Tile]:
    """The rows of an int64 [n, 11] table; tiles that differ in consecutive batch entries only become one."""
    begun: dict[tuple[int, ...], Tile] = {}
    done = []
    for batch, *rest in table.tolist():
        key = tuple(rest)
        last = begun.get(key)
        if last is not None and last.batch + last.batches == batch:
            begun[key] = replace(last, batches=last.batches + 1)
            continue
        if last is not None:
            done.append(last)
        begun[key] = Tile(batch, *rest)
    return sorted([*done, *begun.values()], key=astuple)


@dataclass(frozen=True)
class SparseMode:
    """How the fused-attention contract is asked for the pairs of a tile: its arguments of these names."""

    sparse_mode: int
    pre_tockens: int
    next_tockens: int
    atten_mask: Tensor | None  # bool, True = masked; None = none, then all pairs take part


def sparse_mode_of(tile: Tile, device: torch.device | None = None) -> SparseMode | None:
    """The mode that keeps exactly the pairs of `tile`; None where it keeps none.

    | pairs | mode |
    |---|---|
    | all | 0, without a mask |
    | column <= row | 2 |
    | column <= row + columns - rows | 3 |
    | another band | 4 |
    | anything else | 1, and a mask that says which |
    """
    band = tile.band()
    open_end = 2**31 - 1
    if band is None:
        keep = tile.keep(device)
        return SparseMode(1, open_end, open_end, ~keep) if bool(keep.any()) else None
    low, high = band
    if low > high or tile.q_rows == 0 or tile.kv_rows == 0:
        return None
    last_row, last_column, corner = tile.q_rows - 1, tile.kv_rows - 1, tile.kv_rows - tile.q_rows
    if low <= -last_row and high >= last_column:
        return SparseMode(0, open_end, open_end, None)
    triangle = compressed_mask(device)
    if low <= -last_row and high == 0:
        return SparseMode(2, open_end, open_end, triangle)
    if low <= -last_row and high == corner and corner >= 0:
        return SparseMode(3, open_end, open_end, triangle)
    # Mode 4 counts from the lower right corner.
    return SparseMode(4, corner - low, high - corner, triangle)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def compressed_mask(device: torch.device | None = None) -> Tensor:
    """The bool [2048, 2048] that the compressed modes want: True above the diagonal. One for each device."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


def flash_parts(tile: Tile) -> list[tuple[Tile, bool]] | None:
    """`tile` as parts that are full (False) or square and causal (True); None where it is no union of such.

    rows 5, columns 4, high 1        columns [0, 1) full, a square of 3, and the rows below it full

    x x . .      f | c . .
    x x x .      f | c c .
    x x x x      f | c c c
    x x x x      f | f f f
    x x x x      f | f f f
    """
    band = tile.band()
    if band is None:
        return None
    (low, high), rows, columns = band, tile.q_rows, tile.kv_rows
    if low > 1 - rows or high < 0 or columns - high > rows:
        return None
    if high >= columns - 1:
        return [(tile, False)]
    side = columns - high
    parts = [(tile.part(0, side, high, columns), True)]
    if high > 0:
        parts.append((tile.part(0, rows, 0, high), False))
    if rows > side:
        parts.append((tile.part(side, rows, high, columns), False))
    return parts


def mask_parts(tile: Tile) -> Iterator[Tile]:
    """`tile` in blocks of rows, each with the columns that it needs, so that written masks stay small."""
    band = tile.band()
    for begin in range(0, tile.q_rows, _ROWS_OF_A_MASK):
        end = min(begin + _ROWS_OF_A_MASK, tile.q_rows)
        first, last = 0, tile.kv_rows
        if band is not None:
            first, last = max(0, begin + band[0]), min(tile.kv_rows, end + band[1])
        if first < last:
            yield tile.part(begin, end, first, last)

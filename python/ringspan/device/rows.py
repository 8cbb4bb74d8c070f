"""Where a tile lies in the tensors of a step, and the softmax state of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringspan.device.tiles import Tile


class Partial(NamedTuple):
    """Attention of some rows over some keys: out [B, N, S, Dv] normalised, max and sum [B, N, S], all fp32."""

    out: Tensor
    max: Tensor
    sum: Tensor


@dataclass(frozen=True)
class Place:
    """Rows and columns of a tile. `chosen` (int64, from the tile's first row) leaves out rows that keep nothing."""

    tile: Tile
    chosen: Tensor | None = None

    def rows(self, tensor: Tensor) -> Tensor:
        """The query rows of [B, N, S, D] or [B, N, S]: a view, or a copy where rows are chosen."""
        own = self._narrow(tensor, self.tile.q_row0, self.tile.q_rows)
        return own if self.chosen is None else own.index_select(2, self.chosen)

    def columns(self, tensor: Tensor) -> Tensor:
        """The key rows, a view."""
        return self._narrow(tensor, self.tile.kv_row0, self.tile.kv_rows)

    def put_rows(self, tensor: Tensor, values: Tensor) -> None:
        """Overwrites what `rows` gives."""
        own = self._narrow(tensor, self.tile.q_row0, self.tile.q_rows)
        if self.chosen is None:
            own.copy_(values)
        else:
            own.index_copy_(2, self.chosen, values.to(own.dtype))

    def add_rows(self, tensor: Tensor, values: Tensor) -> None:
        """Adds to what `rows` gives."""
        own = self._narrow(tensor, self.tile.q_row0, self.tile.q_rows)
        if self.chosen is None:
            own.add_(values)
        else:
            own.index_add_(2, self.chosen, values.to(own.dtype))

    def join(self, part: Partial, state: Partial, merge: Callable[[Partial, Partial], Partial]) -> None:
        """The rows' state becomes merge(state, part), in place."""
        joined = merge(Partial(*(self.rows(tensor) for tensor in state)), part)
        for tensor, values in zip(state, joined, strict=True):
            self.put_rows(tensor, values)

    def add_gradients(self, found: Sequence[Tensor], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Adds the gradients of this part's queries, keys and values."""
        self.add_rows(dq, found[0])
        self.columns(dk).add_(found[1])
        self.columns(dv).add_(found[2])

    def _narrow(self, tensor: Tensor, begin: int, count: int) -> Tensor:
        return tensor.narrow(0, self.tile.batch, self.tile.batches).narrow(2, begin, count)


def place_of(tile: Tile, keep: Tensor) -> tuple[Place, Tensor]:
    """The place of `tile`, and `keep` [rows, columns], without the rows in which `keep` holds nothing.

    Accelerators differ in what they return for such rows.
    """
    if not tile.has_empty_rows():
        return Place(tile), keep
    filled = keep.any(1)
    if bool(filled.all()):
        return Place(tile), keep
    chosen = filled.nonzero()[:, 0]
    return Place(tile, chosen), keep.index_select(0, chosen)


def merge(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both. Empty: max -inf, sum 0, out 0."""
    row_max, row_sum, *shares = torch.ops.ringspan._join_softmax(one.max, one.sum, other.max, other.sum)
    of_one, of_other = (share.unsqueeze(-1) for share in shares)
    return Partial(one.out * of_one + other.out * of_other, row_max, row_sum)

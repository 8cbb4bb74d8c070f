"""`to_mask`: a mask_mod or BlockMask as a `ringspan.Mask`, or as a bool tensor where bands cannot say it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from ringspan.flex.bands import BandFinder, Row
from ringspan.flex.blocks import Blocks, blocks_of
from ringspan.flex.grid import Grid, Pairs, on_grid, row_chunks
from ringspan.masks import Mask, bands, documents, full

# Bands of one batch entry beyond which a mask becomes a tensor: as many make no call slower (measured on 8192 causal
# positions in 64 to 4096 documents), and a mask of more is rather noise than structure.
MAX_BANDS = 4096

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@torch.compiler.disable(reason="ringspan.flex reads the values of masks; convert outside of compiled code")
def to_mask(
    mask: BlockMask | MaskMod,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    rows: Tensor | None = None,
    max_bands: int = MAX_BANDS,
) -> Mask | Tensor:
    """A mask that keeps exactly the pairs that `mask` keeps, for `ringspan.attention` or `flex_attention`.

    mask: a mask_mod(b, h, q_idx, kv_idx) -> bool of one pair, or a BlockMask, which must be made for `q_len` and
        `kv_len`: masked outside of the blocks that it lists, kept inside the full ones, its mask_mod in the others.
    q_len, kv_len: lengths of the whole sequences. batch, heads: those of query.
    rows: global positions of this rank's queries (`shard_map.positions(rank)`), int64 [R], or [B, R] where batch
        entries hold other ones; of use for the tensor only. None = all queries.

    Returns a `Mask` where heads do not differ, no batch entry needs more than `max_bands` bands, and either batch
    entries do not differ or q_len == kv_len. Else a bool tensor [B or 1, N or 1, R, kv_len] for `attn_mask`.

    Every pair of the whole sequences is looked at, on every rank, a few million at a time; with a BlockMask only those
    in its partial blocks. ValueError for a BlockMask that does not fit, a mask_mod that gives no bool, and rows
    outside; what the mask_mod raises goes through. Call it outside of compiled code.
    """
    blocks, mod = None, mask
    if isinstance(mask, BlockMask):
        blocks = blocks_of(mask, batch, heads, q_len, kv_len)
        mod = noop_mask if mask.mask_mod is None else mask.mask_mod
    if not callable(mod):
        raise ValueError(f"the mask is of {type(mod).__name__}; give a BlockMask or a mask_mod(b, h, q_idx, kv_idx)")
    pairs = Pairs(batch, heads, q_len, kv_len, _checked_rows(rows, batch, q_len))
    return Rule(mod, blocks, pairs).convert(max_bands)


@dataclass(frozen=True)
class Rule:
    """Which of `pairs` are kept: `mod` decides, inside of `blocks` where there are some."""

    mod: MaskMod
    blocks: Blocks | None
    pairs: Pairs

    def convert(self, max_bands: int = MAX_BANDS) -> Mask | Tensor:
        """See `to_mask`."""
        if self.pairs.q_len == 0 or self.pairs.kv_len == 0:
            return full()  # of no pairs
        found = self._bands(max_bands)
        if found is None or (len(found) > 1 and self.pairs.q_len != self.pairs.kv_len):
            return self._dense()
        masks = [bands(entry) for entry in found]
        if len(masks) == 1:
            whole = found[0] == [(0, self.pairs.q_len, 0, self.pairs.kv_len, None, None)]
            return full() if whole else masks[0]
        return functools.reduce(operator.or_, (self._only(entry) & mask for entry, mask in enumerate(masks)))

    def _pieces(self, rows: Tensor) -> Iterator[Tensor]:
        """Bool [B or 1, N or 1, some rows, kv_len] for the queries at positions `rows`, [R] or [B, R], in order."""
        lists = self._lists(rows)
        # A row of blocks has few columns in which the mod decides.
        most_rows = rows.shape[-1] if self.blocks is None else self.blocks.q_size
        for begin, end in row_chunks(rows.shape[-1], lists[0] * lists[1] * self.pairs.kv_len, most_rows):
            yield self._keep(rows[..., begin:end]).expand(*lists, -1, -1)

    def _lists(self, rows: Tensor) -> tuple[int, int]:
        """Batch entries and heads that the mask tells apart (1: none), the same whatever rows this rank holds."""
        first = torch.zeros(*rows.shape[:-1], 1, dtype=torch.int64)
        shapes = [self._decide(first, torch.zeros(1, dtype=torch.int64)).shape]
        if self.blocks is not None:
            shapes += [self.blocks.at(kind, first, 1).shape for kind in (self.blocks.partial, self.blocks.full)]
        return max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)

    def _keep(self, q: Tensor) -> Tensor:
        if self.blocks is None:
            return self._decide(q, torch.arange(self.pairs.kv_len))
        partial = self.blocks.at(self.blocks.partial, q, self.pairs.kv_len)
        keep = self.blocks.at(self.blocks.full, q, self.pairs.kv_len)
        asked = partial.flatten(0, 2).any(0).nonzero()[:, 0]
        if len(asked) == 0:
            return keep
        inside = keep[..., asked] | (partial[..., asked] & self._decide(q, asked))
        keep = keep.expand(*inside.shape[:2], -1, -1).clone()
        return keep.index_copy_(3, asked, inside)

    def _decide(self, q: Tensor, kv: Tensor) -> Tensor:
        (keep,) = on_grid(_checked_mod(self.mod), Grid(self.pairs.batch, self.pairs.heads, q, kv))
        return keep.expand(-1, -1, q.shape[-1], len(kv))

    def _bands(self, max_bands: int) -> list[list[Row]] | None:
        """Bands of each batch entry, one list where all are equal; None where heads differ or they are too many."""
        finders: list[BandFinder] = []
        for keep in self._pieces(torch.arange(self.pairs.q_len)):
            if keep.shape[1] > 1 and bool((keep[:, :1] != keep).any()):
                return None
            finders = finders or [BandFinder(max_bands) for _ in keep]
            if not all(finder.add(entry[0]) for finder, entry in zip(finders, keep, strict=True)):
                return None
        found = [finder.finish() for finder in finders]
        return found[:1] if all(entry == found[0] for entry in found) else found

    def _only(self, entry: int) -> Mask:
        """Every pair of one batch entry: there a document of all positions, none in the others."""
        lengths = [[self.pairs.q_len if place == entry else 0] for place in range(self.pairs.batch)]
        return documents(lengths=lengths, inside=full())

    def _dense(self) -> Tensor:
        rows = self.pairs.rows
        if rows.shape[-1] == 0:
            return torch.zeros(*self._lists(rows), 0, self.pairs.kv_len, dtype=torch.bool)
        return torch.cat(list(self._pieces(rows)), 2)


def _checked_mod(mod: MaskMod) -> Callable:
    def decide(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor]:
        keep = mod(b, h, q, kv)
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.dim() != 0:
            given = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise ValueError(f"mask_mod gives {given} for one pair; it must give a bool tensor of shape []")
        return (keep,)

    return decide


def _checked_rows(rows: Tensor | None, batch: int, q_len: int) -> Tensor:
    if rows is None:
        return torch.arange(q_len)
    if rows.dtype != torch.int64 or rows.dim() not in (1, 2) or (rows.dim() == 2 and len(rows) != batch):
        raise ValueError(f"rows is {rows.dtype} {list(rows.shape)}; give int64 [R], or [{batch}, R]")
    if rows.numel() and not -1 <= int(rows.min()) <= int(rows.max()) < q_len:
        raise ValueError(f"rows hold {int(rows.min())} to {int(rows.max())}, but there are {q_len} queries")
    # Padding rows (-1) are never read.
    return rows.clamp(min=0)

"""ShardMap: who holds which global positions, and in which local rows.

Ten positions on two ranks (the digit is the rank that holds the position):

    contiguous   0 0 0 0 0 1 1 1 1 1
    head_tail    0 0 1 1 1 1 1 0 0 0      2P chunks; rank r holds chunks r and 2P-1-r
    striped      0 1 0 1 0 1 0 1 0 1

and, by work under a mask, per_document and balanced. Documents of 8 and 4 tokens on two ranks, causal inside:

    position      0 1 2 3 4 5 6 7 | 8 9 10 11
    kept pairs    1 2 3 4 5 6 7 8 | 1 2  3  4
    per_document  0 0 1 1 1 1 0 0 | 0 1  1  0      23 pairs each

Any length and any number of ranks: chunk c of n begins at floor(c * seq_len / n), and a shard may be empty.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringspan.entry import enters
from ringspan.gather import Axes, gather_rows, place_in, zero_rows
from ringspan.group import Group
from ringspan.masks import Frame, Mask, int64_table
from ringspan.names import MAPS, SPEC_VERSION
from ringspan.numbers import check_whole, is_whole, shown

CONTIGUOUS, HEAD_TAIL, STRIPED, LENGTHS, SEGMENTS = map(
    MAPS.index, ("contiguous", "head_tail", "striped", "lengths", "segments")
)
Segment = tuple[int, int, int, int]  # local_row, begin, length, stride


@dataclass(frozen=True)
class ShardMap:
    """A split of one sequence over the ranks of a group. Make one with the constructors below.

    Plain and immutable; equal maps compare equal. The rank is always the place in the group.
    """

    kind: int
    seq_len: int
    world_size: int
    rows: tuple[int, ...] = ()  # kinds 3 and 4: local rows of each rank
    segment_lists: tuple[tuple[tuple[Segment, ...], ...], ...] = ()  # kind 4: [batch or 1][rank]
    tables: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def contiguous(seq_len: int, world_size: int) -> ShardMap:
        """One run of positions per rank, as even as possible."""
        return _regular(CONTIGUOUS, seq_len, world_size)

    @staticmethod
    def head_tail(seq_len: int, world_size: int) -> ShardMap:
        """Rank r holds chunks r and 2P-1-r of 2P: equal work under a causal mask."""
        return _regular(HEAD_TAIL, seq_len, world_size)

    @staticmethod
    def striped(seq_len: int, world_size: int) -> ShardMap:
        """Position i lies on rank i mod P."""
        return _regular(STRIPED, seq_len, world_size)

    @staticmethod
    def from_lengths(lengths: Sequence[int]) -> ShardMap:
        """Contiguous shards of these lengths, one for each rank; 0 is an empty shard."""
        rows = tuple(lengths) if isinstance(lengths, Iterable) else ()
        if not rows:
            raise ValueError(f"from_lengths({shown(lengths)}): give one length for each rank")
        for length in rows:
            check_whole("a length in from_lengths", length, 0)
        check_whole("the sum of the lengths in from_lengths", sum(rows), 0)
        return ShardMap(LENGTHS, sum(rows), len(rows), rows, (), (torch.tensor(rows, dtype=torch.int64),))

    @staticmethod
    def from_segments(
        segments: Sequence, *, seq_len: int | None = None, local_rows: Sequence[int] | None = None
    ) -> ShardMap:
        """Any split: for each rank a list of segments (local_row, begin, length, stride), or one such list per entry.

        A segment puts positions begin, begin + stride, ... into `length` local rows from `local_row` on. `segments` is
        [rank][segment], or [batch][rank][segment] where entries differ. `seq_len` is by default the end of the last
        position held; `local_rows` (per rank) by default the end of the last row used. Rows that no segment covers are
        padding: never read, output and gradients 0. Overlapping rows or positions are refused when the map is used.
        """
        lists = _normalise_segments(segments)
        world_size = len(lists[0])
        flat = [segment for ranks in lists for owned in ranks for segment in owned]
        if seq_len is None:
            seq_len = max((begin + (length - 1) * stride + 1 for _, begin, length, stride in flat), default=0)
        if local_rows is None:
            local_rows = [
                max((row + length for ranks in lists for row, _, length, _ in ranks[rank]), default=0)
                for rank in range(world_size)
            ]
        rows = tuple(local_rows)
        check_whole("seq_len", seq_len, 0)
        if len(rows) != world_size:
            raise ValueError(f"local_rows has {len(rows)} entries, but segments has {world_size} ranks")
        table = [
            [batch, rank, *segment]
            for batch, ranks in enumerate(lists)
            for rank, owned in enumerate(ranks)
            for segment in owned
        ]
        tables = (
            torch.tensor(table, dtype=torch.int64).reshape(len(table), 6),
            torch.tensor(rows, dtype=torch.int64),
        )
        return ShardMap(SEGMENTS, seq_len, world_size, rows, lists, tables)

    @staticmethod
    def per_document(
        lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor, world_size: int, *, seq_len: int | None = None
    ) -> ShardMap:
        """Packed documents, causal inside each: every document is split head-tail on its own, and kept pairs are shared
        out evenly, whatever the lengths.

        lengths: [n], or [B, n] where batch entries differ (zeros fill up); shards then get padding rows where entries
        need different numbers of rows. What follows the last document, up to `seq_len`, keeps nothing and is shared
        out too. ValueError for a negative length, or a `seq_len` below the sum of the lengths.
        """
        check_whole("world_size", world_size, 1)
        table = int64_table("per_document(lengths)", lengths, fill=0)
        if table.dim() not in (1, 2):
            raise ValueError(f"per_document(lengths) has shape {list(table.shape)}; give [n] or [B, n]")
        entries = table.reshape(-1, table.shape[-1]).tolist()
        if seq_len is None:
            seq_len = max((sum(entry) for entry in entries), default=0)
        check_whole("seq_len", seq_len, 0)
        found = [torch.ops.ringspan._per_document(entry, world_size, seq_len) for entry in entries]
        return _from_tables(found, world_size, seq_len)

    @staticmethod
    def balanced(mask: Mask, seq_len: int, world_size: int) -> ShardMap:
        """A split under which every rank has the same work under `mask`, near enough, in few segments.

        For self-attention: queries and K/V are split alike. The busiest rank has at most 1.02 times the mean where
        there are 64 tokens a rank or more and no few rows hold most of the work; `imbalance(mask)` tells what was
        reached, and a warning comes where that is more. All batch entries of the mask are added up.
        """
        check_whole("seq_len", seq_len, 0)
        check_whole("world_size", world_size, 1)
        tables: list[Tensor] = []
        spec = _square_spec(mask.num_lists(), ShardMap.contiguous(seq_len, world_size), mask, tables)
        smap = _from_tables([torch.ops.ringspan._balanced(spec, tables)], world_size, seq_len)
        reached = smap.imbalance(mask)
        if reached > 1.02:
            warnings.warn(
                f"ShardMap.balanced: the busiest of {world_size} ranks has {reached:.3f} times the mean work; "
                f"{seq_len} tokens under this mask allow no better",
                stacklevel=2,
            )
        return smap

    @property
    def num_lists(self) -> int:
        """Batch entries that the map tells apart; 1 where one split serves all."""
        return max(1, len(self.segment_lists))

    def local_rows(self, rank: int) -> int:
        """Rows of the local tensors of `rank`, padding included."""
        self._check_rank(rank)
        if self.kind >= LENGTHS:
            return self.rows[rank]
        return sum(length for _, _, length, _ in self.segments(rank))

    def segments(self, rank: int, batch: int = 0) -> tuple[Segment, ...]:
        """The segments (local_row, begin, length, stride) of `rank`, without empty ones."""
        self._check_rank(rank)
        if self.kind == SEGMENTS:
            return self.segment_lists[batch if self.num_lists > 1 else 0][rank]
        seq_len, world = self.seq_len, self.world_size
        if self.kind == STRIPED:
            found = [(0, rank, (seq_len - rank + world - 1) // world, world)]
        elif self.kind == LENGTHS:
            found = [(0, sum(self.rows[:rank]), self.rows[rank], 1)]
        elif self.kind == CONTIGUOUS:
            found = [_chunk(rank, world, seq_len, 0)]
        else:
            head = _chunk(rank, 2 * world, seq_len, 0)
            found = [head, _chunk(2 * world - 1 - rank, 2 * world, seq_len, head[2])]
        return tuple(segment for segment in found if segment[2] > 0)

    def positions(self, rank: int, batch: int = 0) -> Tensor:
        """Global positions of the local rows of `rank`: int64 [local rows], -1 for padding."""
        positions = torch.full((self.local_rows(rank),), -1, dtype=torch.int64)
        for row, begin, length, stride in self.segments(rank, batch):
            positions[row : row + length] = torch.arange(begin, begin + length * stride, stride)
        return positions

    def work(self, mask: Mask) -> list[int]:
        """Kept pairs of each rank, queries and keys split by this map, all batch entries added up."""
        lists = max(self.num_lists, mask.num_lists())
        tables: list[Tensor] = []
        spec = _square_spec(lists, self, mask, tables)
        return torch.ops.ringspan._work(spec, tables)

    def imbalance(self, mask: Mask) -> float:
        """Work of the busiest rank over the mean of all; 1 where there is no work at all."""
        pairs = self.work(mask)
        return max(pairs) * self.world_size / sum(pairs) if sum(pairs) else 1.0

    def shard(self, x: Tensor, rank: int, dim: int, batch_dim: int = 0) -> Tensor:
        """The local rows of `rank` out of the whole sequence along `dim`; padding rows are 0. Differentiable.

        `batch_dim` is read only where the map differs between batch entries. ValueError if x has not seq_len rows.
        """
        self._check_rows(x, dim, self.seq_len, "the sequence")
        if self.num_lists == 1:
            return self._shard_list(x, rank, dim, 0)
        self._check_batch(x, batch_dim)
        parts = [self._shard_list(x.narrow(batch_dim, batch, 1), rank, dim, batch) for batch in range(self.num_lists)]
        return torch.cat(parts, batch_dim)

    @enters()
    def unshard(
        self, x: Tensor, *, group: Group = None, dim: int, grad: str | None = None, batch_dim: int = 0
    ) -> Tensor:
        """The whole sequence out of every rank's local rows, on every rank. A collective over `group`.

        Under autograd say what the gradients of the ranks mean: `grad="sum"` if each rank's loss is its own part
        (they add up), `grad="slice"` if all ranks compute the same loss (this rank's rows of its own gradient).
        ValueError if that is left out, if x has other rows than the map, or if a position is held by no rank.
        Call it outside compiled code: the rank is a constant there.
        """
        self._check_rank(0)
        place = place_in(group, self.world_size, x)
        self._check_rows(x, dim, self.local_rows(place[1]), f"rank {place[1]}")
        if self.num_lists > 1:
            self._check_batch(x, batch_dim)
        return gather_rows(self, x, place, Axes(dim, batch_dim), grad)

    def to_tensor(self) -> Tensor:
        """This map as one int64 tensor [n, 6], for `q_map` and `kv_map` of the contract's ops in a group.

        Rows of (batch entry, rank, local row, begin, length, stride), one for each segment. A row of rank -1 says the
        sequence length as its length, a row of length 0 the number of local rows of its rank as its local row.
        """
        rows = [(0, -1, 0, 0, self.seq_len, 1)]
        rows += [(0, rank, self.local_rows(rank), 0, 0, 1) for rank in range(self.world_size)]
        for batch in range(self.num_lists):
            for rank in range(self.world_size):
                rows += [(batch, rank, *segment) for segment in self.segments(rank, batch)]
        return torch.tensor(rows, dtype=torch.int64)

    def encode(self, tables: list[Tensor]) -> list[int]:
        """The two words of this map in a call's spec; its tables are appended to `tables`."""
        first = len(tables) if self.tables else 0
        tables.extend(self.tables)
        return [self.kind, first]

    def _shard_list(self, x: Tensor, rank: int, dim: int, batch: int) -> Tensor:
        parts, row = [x.narrow(dim, 0, 0)], 0  # the graph of a shard without rows is that of x too
        for begin_row, begin, length, stride in sorted(self.segments(rank, batch)):
            parts.append(zero_rows(x, dim, begin_row - row))
            end = begin + (length - 1) * stride + 1
            index = [slice(None)] * x.dim()
            index[dim] = slice(begin, end, stride)
            parts.append(x[tuple(index)])
            row = begin_row + length
        parts.append(zero_rows(x, dim, self.local_rows(rank) - row))
        return torch.cat(parts, dim)

    def _check_rank(self, rank: int) -> None:
        if not is_whole(rank) or not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank!r} is outside the map of {self.world_size} ranks; use the place in the group")

    def _check_batch(self, x: Tensor, batch_dim: int) -> None:
        if x.shape[batch_dim] != self.num_lists:
            raise ValueError(
                f"x has {x.shape[batch_dim]} batch entries along dim {batch_dim}, but the map splits "
                f"{self.num_lists}; give batch_dim, or a map of one list"
            )

    def _check_rows(self, x: Tensor, dim: int, rows: int, what: str) -> None:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"dim {dim} is outside a tensor of {x.dim()} dimensions")
        if x.shape[dim] != rows:
            raise ValueError(
                f"x has {x.shape[dim]} rows along dim {dim}, but {what} has {rows} in this map ({MAPS[self.kind]}, "
                f"{self.seq_len} positions, {self.world_size} ranks); check dim and the map's length"
            )


def _square_spec(batch: int, smap: ShardMap, mask: Mask, tables: list[Tensor]) -> list[int]:
    """The description of self-attention whose queries and keys are both split by `smap`."""
    seq_len, words = smap.seq_len, smap.encode(tables)
    mask_words = mask.encode(Frame(seq_len, seq_len, True), tables)
    return [SPEC_VERSION, smap.world_size, batch, seq_len, seq_len, *words, *words, *mask_words]


def _regular(kind: int, seq_len: int, world_size: int) -> ShardMap:
    check_whole("seq_len", seq_len, 0)
    check_whole("world_size", world_size, 1)
    return ShardMap(kind, seq_len, world_size)


def _from_tables(tables: list[Tensor], world_size: int, seq_len: int) -> ShardMap:
    """Tables of (rank, segment) [n, 5], one for each batch entry, as a map; rows are those the longest entry needs."""
    lists: list[list[list[Segment]]] = []
    for table in tables:
        lists.append([[] for _ in range(world_size)])
        for rank, *segment in table.tolist():
            lists[-1][rank].append(tuple(segment))
    return ShardMap.from_segments(lists, seq_len=seq_len)


def _chunk(index: int, chunks: int, seq_len: int, row: int) -> Segment:
    begin = index * seq_len // chunks
    return row, begin, (index + 1) * seq_len // chunks - begin, 1


def _normalise_segments(segments: Sequence) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
    """[rank][segment] or [batch][rank][segment] as the latter, in tuples, without empty segments."""
    ranks = [list(part) for part in segments]
    per_batch = any(isinstance(entry, list | tuple) and not _is_segment(entry) for part in ranks for entry in part)
    lists = ranks if per_batch else [ranks]
    result = []
    for batch, owners in enumerate(lists):
        if len(owners) != len(lists[0]) or not owners:
            raise ValueError(f"from_segments: entry {batch} has {len(owners)} ranks, entry 0 has {len(lists[0])}")
        result.append(tuple(tuple(_checked_segment(segment) for segment in owned) for owned in owners))
    if len(result) > 1 and not all(any(owners) for owners in result):
        raise ValueError("from_segments: a batch entry has no segment at all; give each entry at least one")
    return tuple(result)


def _is_segment(entry: Sequence) -> bool:
    return len(entry) == 4 and all(isinstance(value, int) for value in entry)


def _checked_segment(segment: Sequence[int]) -> Segment:
    if len(segment) != 4:
        raise ValueError(f"segment {segment!r}: give (local_row, begin, length, stride)")
    local_row, begin, length, stride = segment
    check_whole(f"local_row of segment {segment!r}", local_row, 0)
    check_whole(f"begin of segment {segment!r}", begin, 0)
    check_whole(f"length of segment {segment!r}", length, 1)
    check_whole(f"stride of segment {segment!r}", stride, 1)
    return local_row, begin, length, stride

"""From rows of kept pairs to bands: (q_begin, q_end, kv_begin, kv_end, lo, hi), disjoint, and exactly these pairs.

The kept columns of a row are runs. From row to row the runs of a band begin at max(kv_begin, i + lo) and end at
min(kv_end, i + hi + 1): the beginning stands still and then moves with the diagonal, the end moves and then stands:

    . x x . . . .      the first run opens a band
    . x x x . . .      the end moves
    . . x x x . .      the beginning moves too, and from now on it must
    . . . x x . .      the end stands still, and from now on it must
    . . . . . x x      no continuation of that: the band is closed above, another one opens
"""

from __future__ import annotations

import torch
from torch import Tensor

Row = tuple[int, int, int, int, int | None, int | None]


class OpenBand:
    """A band whose last row is not known yet."""

    def __init__(self, row: int, begin: int, end: int) -> None:
        self.first_row, self.first_begin, self.first_end = row, begin, end
        self.lo: int | None = None  # None as long as the beginning stood still
        self.end_moved = self.end_stood = False

    def takes(self, row: int, begin: int, begin_step: int, end_step: int) -> bool:
        """Goes on to the row after `row`, where the run began at `begin`, if its steps are those of one band."""
        if begin_step not in (0, 1) or end_step not in (0, 1):
            return False
        if (begin_step == 0 and self.lo is not None) or (end_step == 1 and self.end_stood):
            return False
        if begin_step == 1 and self.lo is None:
            self.lo = begin - row
        self.end_moved |= end_step == 1
        self.end_stood |= end_step == 0
        return True

    def close(self, end_row: int, end: int) -> Row:
        """The band, for rows up to `end_row`, the last of which ended at column `end`."""
        hi = self.first_end - self.first_row - 1 if self.end_moved else None
        return self.first_row, end_row, self.first_begin, end, self.lo, hi


class BandFinder:
    """Takes the rows of a mask in order and finds its bands; gives up beyond `max_bands`.

    Time is that of reading the rows, and of a few steps for each row in which a run changes how it moves.
    """

    def __init__(self, max_bands: int) -> None:
        self._max_bands = max_bands
        self._next_row = 0
        self._closed: list[Row] = []
        self._open: list[OpenBand] = []
        self._last = torch.empty(0, 2, dtype=torch.int64)  # runs (begin, end) of the last row

    def add(self, keep: Tensor) -> bool:
        """Takes the next rows, bool [R, C]. False if they are more bands than allowed: the rows are of no use then."""
        runs, counts = _runs_of(keep, self._last)
        if int(counts.max()) > self._max_bands:
            return False
        steps = runs[1:] - runs[:-1]
        unused = torch.arange(runs.shape[1])[None, :] >= counts[1:, None]
        steps[unused] = 0
        for index in _changes(steps, counts):
            self._turn(self._next_row + index, runs[index, : counts[index]], runs[index + 1, : counts[index + 1]])
            if len(self._closed) + len(self._open) > self._max_bands:
                return False
        self._next_row += keep.shape[0]
        self._last = runs[-1, : counts[-1]]
        return True

    def finish(self) -> list[Row]:
        """The bands of all rows taken."""
        self._close_all(self._next_row, self._last)
        return self._closed

    def _turn(self, row: int, before: Tensor, after: Tensor) -> None:
        """Row `row` has the runs `after`, the row above it has `before`."""
        if len(before) != len(after):
            self._close_all(row, before)
            self._open = [OpenBand(row, begin, end) for begin, end in after.tolist()]
            return
        for slot, ((begin, end), (new_begin, new_end)) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
            if not self._open[slot].takes(row - 1, begin, new_begin - begin, new_end - end):
                self._closed.append(self._open[slot].close(row, end))
                self._open[slot] = OpenBand(row, new_begin, new_end)

    def _close_all(self, end_row: int, runs: Tensor) -> None:
        for band, (_, end) in zip(self._open, runs.tolist(), strict=True):
            self._closed.append(band.close(end_row, end))
        self._open = []


def _runs_of(keep: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Runs (begin, end) of the rows, int64 [1 + R, most, 2] filled up with 0, and their counts; `last` comes first."""
    # Where a column differs from the one before it; what lies outside is not kept, so beginnings and ends take turns.
    edges = torch.cat([keep[:, :1], keep[:, 1:] ^ keep[:, :-1], keep[:, -1:]], 1)
    row, column = edges.nonzero(as_tuple=True)
    row, begin, end = row[::2] + 1, column[::2], column[1::2]
    counts = torch.bincount(row, minlength=keep.shape[0] + 1)
    first = counts.cumsum(0) - counts
    counts[0] = len(last)
    runs = torch.zeros(keep.shape[0] + 1, max(1, int(counts.max())), 2, dtype=torch.int64)
    runs[row, torch.arange(len(row)) - first[row]] = torch.stack([begin, end], 1)
    runs[0, : len(last)] = last
    return runs, counts


def _changes(steps: Tensor, counts: Tensor) -> list[int]:
    """Rows whose runs do not simply go on as they went on in the row above.

    The first row always counts as one, and so does the row after each: a band that opened there has made no step yet.
    """
    changed = (counts[1:] != counts[:-1]) | ((steps != 0) & (steps != 1)).flatten(1).any(1)
    changed[1:] |= (steps[1:] != steps[:-1]).flatten(1).any(1)
    changed[0] = True
    changed[1:] |= changed[:-1].clone()
    return changed.nonzero()[:, 0].tolist()

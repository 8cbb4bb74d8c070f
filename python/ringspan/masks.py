"""Masks: which (query i, key j) pairs take part, by inequalities of global positions.

A mask is a frozen description. It becomes two things at a call: a few integers (`spec`) and int64 CPU tensors
(`tables`), laid out as docs/decisions/call-description.md says. Nothing here reads a value of a tensor, so traced code
can build and pass masks, and new values compile nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringspan.names import MASK_CODES
from ringspan.numbers import check_whole, is_beyond_int64, is_whole, shown

UNBOUNDED = -1  # a window's open side
NO_DIAGONAL = 1 << 60  # a band's open side
_CORNERS = {"top_left": 1, "bottom_right": 2}


@dataclass(frozen=True)
class Frame:
    """What a mask has to know of the call that it serves: global lengths, and whether maps give positions."""

    q_len: int
    kv_len: int
    has_positions: bool


class Mask:
    """Base of all masks: `a & b` keeps what both keep, `a | b` what either keeps."""

    def __and__(self, other: Mask) -> Mask:
        return Both("and", self, _checked(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Both("or", self, _checked(other, "|"))

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """The words of this mask; its tables are appended to `tables`. ValueError if it does not fit `frame`."""
        raise NotImplementedError

    def num_lists(self) -> int:
        """Batch entries that the mask tells apart; 1 where one rule serves all."""
        return 1


@dataclass(frozen=True)
class Full(Mask):
    """Every pair."""

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        return [MASK_CODES["full"]]


@dataclass(frozen=True)
class Causal(Mask):
    """Pairs with j <= i."""

    align: str | None

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        return [MASK_CODES["causal"], corner_of("causal", self.align, frame)]


@dataclass(frozen=True)
class Window(Mask):
    """Pairs with i - left <= j <= i + right."""

    left: int
    right: int
    align: str | None

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        return [MASK_CODES["window"], self.left, self.right, corner_of("window", self.align, frame)]


@dataclass(frozen=True)
class Chunked(Mask):
    """Pairs with j <= i in the same chunk of `size` positions."""

    size: int
    align: str | None

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        return [MASK_CODES["chunked"], self.size, corner_of("chunked", self.align, frame)]


@dataclass(frozen=True)
class Prefix(Mask):
    """Pairs with j <= i or j < prefix."""

    lengths: Tensor = field(compare=False)  # int64 [1 or B]
    align: str | None

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        return [MASK_CODES["prefix"], _append(tables, self.lengths), corner_of("prefix", self.align, frame)]

    def num_lists(self) -> int:
        """See `Mask.num_lists`."""
        return self.lengths.shape[0]


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Pairs of one document that `inside` keeps by positions counted in the document."""

    table: Tensor  # int64: lengths [1 or B, n], or ids [1 or B, S]
    by_ids: bool
    inside: Mask

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        if frame.q_len != frame.kv_len:
            raise ValueError(
                f"documents() describes one sequence, but the queries have {frame.q_len} positions and the keys "
                f"{frame.kv_len}; use bands(...) for cross attention"
            )
        if self.by_ids and self.table.shape[1] != frame.q_len:
            raise ValueError(
                f"documents(ids=...) names {self.table.shape[1]} positions, but the sequence has {frame.q_len}; give "
                "the ids of the whole sequence, not of this rank's shard"
            )
        code = MASK_CODES["document_ids" if self.by_ids else "documents"]
        return [code, _append(tables, self.table), *_inside_words(self.inside)]

    def num_lists(self) -> int:
        """See `Mask.num_lists`."""
        return self.table.shape[0]


@dataclass(frozen=True, eq=False)
class Bands(Mask):
    """The union of rectangles cut by two diagonals."""

    table: Tensor  # int64 [n, 6]

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        return [MASK_CODES["bands"], _append(tables, self.table)]


@dataclass(frozen=True)
class Both(Mask):
    """Two masks as one: `operator` "and" keeps what both keep, "or" what either keeps."""

    operator: str
    first: Mask
    second: Mask

    def encode(self, frame: Frame, tables: list[Tensor]) -> list[int]:
        """See `Mask.encode`."""
        return [*self.first.encode(frame, tables), *self.second.encode(frame, tables), MASK_CODES[self.operator]]

    def num_lists(self) -> int:
        """See `Mask.num_lists`."""
        return max(self.first.num_lists(), self.second.num_lists())


def full() -> Mask:
    """Every query sees every key."""
    return Full()


def causal(align: str | None = None) -> Mask:
    """Query i sees keys j <= i (`align="bottom_right"`: j <= i + Skv - Sq).

    `align` may be left out where both lengths are equal or where maps give the positions.
    """
    return Causal(checked_align("causal", align))


def window(left: int | None, right: int | None = 0, align: str | None = None) -> Mask:
    """Query i sees keys i - left <= j <= i + right; None (or -1) leaves a side open. `align` as for `causal`."""
    return Window(_checked_side("left", left), _checked_side("right", right), checked_align("window", align))


def chunked(size: int, align: str | None = None) -> Mask:
    """Query i sees keys j <= i of its own chunk, i // size == j // size. `align` as for `causal`."""
    return Chunked(_checked_size("chunked", size), checked_align("chunked", align))


def prefix(lengths: int | Sequence[int] | Tensor, align: str | None = None) -> Mask:
    """Query i sees keys j <= i and the first `lengths[b]` keys: [B] or one number for every entry."""
    if isinstance(lengths, int):  # True is found below
        lengths = [lengths]
    table = int64_table("prefix(lengths)", lengths)
    if table.dim() != 1 or table.shape[0] == 0:
        raise ValueError(f"prefix(lengths) has shape {list(table.shape)}; give [B], or one number for every entry")
    return Prefix(table, checked_align("prefix", align))


def documents(
    *,
    lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    inside: Mask | None = None,
) -> Mask:
    """Packed documents: a pair takes part if both positions lie in one document and `inside` (causal) keeps it.

    Give `lengths` ([n] or [B, n], zeros fill up; what follows the last document is padding) or `ids` ([S] or [B, S],
    0 is padding; the positions of a document need not be neighbours). Both describe the whole sequence, never a shard.
    `inside` is full(), causal(), window(...) or chunked(...), by positions counted in the document.
    """
    given = lengths if ids is None else ids
    if given is None or (lengths is not None and ids is not None):
        raise ValueError(f"documents() needs either lengths or ids, and got {'neither' if given is None else 'both'}")
    by_ids = ids is not None
    name = "documents(ids)" if by_ids else "documents(lengths)"
    table = int64_table(name, given, fill=None if by_ids else 0)
    if table.dim() == 1:
        table = table.unsqueeze(0)
    if table.dim() != 2 or table.shape[0] == 0:
        raise ValueError(f"{name} has shape {list(table.shape)}; give one row, or one row for each batch entry")
    inside = Causal(None) if inside is None else inside
    _inside_words(inside)
    return Documents(table, by_ids, inside)


def bands(rows: Sequence[Sequence[int | None]] | Tensor) -> Mask:
    """The union of bands (q_begin, q_end, kv_begin, kv_end, lo, hi).

    A band keeps q_begin <= i < q_end, kv_begin <= j < kv_end, lo <= j - i <= hi; None leaves lo or hi open.
    """
    if not isinstance(rows, Tensor) and isinstance(rows, Iterable):
        rows = [_checked_band(row) for row in rows]
    table = int64_table("bands()", rows)
    if table.numel() == 0:
        table = table.reshape(0, 6)
    if table.dim() != 2 or table.shape[1] != 6:
        raise ValueError(f"bands() has shape {list(table.shape)}; give [n, 6]")
    return Bands(table)


def int64_table(name: str, values: Sequence | Tensor, fill: int | None = None) -> Tensor:
    """`values` as an int64 CPU tensor; rows of different lengths are filled up with `fill`. ValueError for others."""
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise ValueError(f"{name} is of {values.dtype}; give whole numbers")
        if values.device.type == "meta":
            raise ValueError(f"{name} lies on meta, where it has no values, and the call reads them on cpu; give those")
        return values.detach().to(device="cpu", dtype=torch.int64)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {shown(values)}; give whole numbers")
    values = list(values)
    if fill is not None and values and all(isinstance(row, list | tuple) for row in values):
        width = max(len(row) for row in values)
        values = [[*row, *[fill] * (width - len(row))] for row in values]
    flat = [value for row in values for value in (row if isinstance(row, list | tuple) else [row])]
    for value in flat:
        if not is_whole(value) or is_beyond_int64(value):
            raise ValueError(f"{name} contains {shown(value)}; give whole numbers of 64 bits")
    try:
        return torch.tensor(values, dtype=torch.int64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}; give rows of one length") from None


def _append(tables: list[Tensor], table: Tensor) -> int:
    tables.append(table)
    return len(tables) - 1


def corner_of(name: str, align: str | None, frame: Frame) -> int:
    """The code of the corner that queries and keys share. ValueError where it is open."""
    if align is not None:
        return _CORNERS[align]
    if frame.q_len != frame.kv_len and not frame.has_positions:
        raise ValueError(
            f"{name}() is ambiguous for {frame.q_len} queries and {frame.kv_len} keys; say align='top_left' or "
            "align='bottom_right', or give shard_map and kv_shard_map, which fix the positions"
        )
    return _CORNERS["top_left"]


def _inside_words(inside: Mask) -> list[int]:
    if isinstance(inside, Full):
        return [MASK_CODES["full"], 0, 0, 0]
    if isinstance(inside, Causal | Window | Chunked):
        if inside.align is not None:
            raise ValueError(f"documents(inside=...) has align={inside.align!r}; inside a document leave align out")
        if isinstance(inside, Causal):
            return [MASK_CODES["causal"], 0, 0, 0]
        if isinstance(inside, Window):
            return [MASK_CODES["window"], inside.left, inside.right, 0]
        return [MASK_CODES["chunked"], 0, 0, inside.size]
    raise ValueError(f"documents(inside={inside!r}): give full(), causal(), window(...) or chunked(...)")


def _checked(other: object, operator: str) -> Mask:
    if not isinstance(other, Mask):
        raise ValueError(f"mask {operator} {type(other).__name__}: both sides must be masks")
    return other


def checked_align(name: str, align: str | None) -> str | None:
    """`align`, where it is None or a corner; ValueError else."""
    if align is not None and align not in _CORNERS:
        raise ValueError(f"{name}(align={align!r}): give 'top_left', 'bottom_right' or None")
    return align


def _checked_side(name: str, side: int | None) -> int:
    if side is None:
        return UNBOUNDED
    if not is_whole(side) or side < UNBOUNDED or is_beyond_int64(side):
        raise ValueError(f"window({name}={shown(side)}): give a whole number >= 0 of 64 bits, or None for an open side")
    return UNBOUNDED if _is_wide(side) else side


def _is_wide(number: int) -> bool:
    """Whether it reaches beyond any sequence. A symbol of traced code is a length, and a comparison would bind it."""
    return isinstance(number, int) and not torch.compiler.is_compiling() and not -NO_DIAGONAL < number < NO_DIAGONAL


def _checked_size(name: str, size: int) -> int:
    check_whole(f"{name}(size)", size, 1)
    return NO_DIAGONAL if _is_wide(size) else size


def _checked_band(row: object) -> list[int | None]:
    """Six numbers; the ends may be None. Beyond 2**60 positions a side is open and an end is that of the sequence."""
    if not isinstance(row, Sequence | Tensor) or isinstance(row, str):
        raise ValueError(f"bands() contains {shown(row)}; give (q_begin, q_end, kv_begin, kv_end, lo, hi)")
    if len(row) != 6:
        raise ValueError(f"bands(): {tuple(row)} has {len(row)} numbers; give 6")
    opened = (*[None] * 4, -NO_DIAGONAL, NO_DIAGONAL)
    numbers = []
    for value, open_value in zip(row, opened, strict=True):
        number = open_value if value is None else value
        if number is not None and is_whole(number) and not is_beyond_int64(number) and _is_wide(number):
            number = NO_DIAGONAL if number > 0 else -NO_DIAGONAL
        numbers.append(number)
    return numbers

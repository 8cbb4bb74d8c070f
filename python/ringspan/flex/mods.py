"""A score_mod as arguments of `ringspan.attention`: scale, softcap, bias and mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringspan.flex.grid import Grid, Pairs, on_grid, row_chunks
from ringspan.flex.masks import Rule
from ringspan.flex.score import Form, Score
from ringspan.masks import Mask

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def scale_and_softcap(form: Form, scale: float) -> dict[str, Any]:
    """`attention` computes softcap * tanh(scale * q.k / softcap), so both factors go into scale, with their signs."""
    if form.inner is None:
        return {"scale": scale * form.factor, "softcap": None}
    if form.factor == 0:
        raise NotImplementedError("score_mod multiplies a tanh of the score by 0; there is no softcap of 0")
    return {"scale": scale * form.inner * form.factor, "softcap": abs(form.factor)}


def read_score_mod(mod: ScoreMod, pairs: Pairs, dtype: torch.dtype) -> tuple[Form, Mask | Tensor | None]:
    """The form of `mod` with `added` for this rank's rows, [B or 1, N or 1, R or 1, kv_len or 1], and its mask.

    dtype: that of scores. NotImplementedError where the mod is none of the forms of `score`.
    """
    if pairs.q_len == 0 or pairs.kv_len == 0:
        return Form(dtype), None  # of no pairs
    # Every rank reads the form at one place, and twice along each axis, so that all know the same of it: what it adds
    # has one element along an axis that it does not look at.
    place = torch.zeros(2, dtype=torch.int64)
    first = _read(mod, Grid(pairs.batch, pairs.heads, place.expand(*pairs.rows.shape[:-1], 2), place), dtype)
    added = None if first.added is None else _added(mod, pairs, first, first.added, dtype)
    mask = None
    score_of: Any = mod
    if first.kept is not None:
        mask = Rule(lambda *place: score_of(Score.of(Form(dtype)), *place).form.kept, None, pairs).convert()
    return replace(first, added=added, kept=None), mask


def _added(mod: ScoreMod, pairs: Pairs, first: Form, at_first: Tensor, dtype: torch.dtype) -> Tensor:
    """[B or 1, N or 1, R or 1, kv_len or 1]; of no rows where it has an axis of rows and this rank has none.

    at_first: what was added where the form was read first.
    """
    lists, by_rows = at_first.shape[0] * at_first.shape[1], at_first.shape[2] > 1
    rows = pairs.rows
    if not by_rows or rows.shape[-1] == 0:
        rows = torch.zeros(*rows.shape[:-1], 1, dtype=torch.int64)  # any one row
    parts = []
    for begin, end in row_chunks(rows.shape[-1], lists * pairs.kv_len, rows.shape[-1]):
        form = _read(mod, pairs.grid(rows[..., begin:end]), dtype)
        if (form.factor, form.inner) != (first.factor, first.inner):
            raise NotImplementedError("score_mod applies other numbers to the score each time that it is called")
        if form.added is None:
            raise NotImplementedError("score_mod adds something to the score only some of the times that it is called")
        parts.append(form.added)
    added = torch.cat(parts, 2)
    return added[:, :, : pairs.rows.shape[-1]] if by_rows else added


def _read(mod: ScoreMod, grid: Grid, dtype: torch.dtype) -> Form:
    """The form of `mod` on a grid, with tensors of its pairs."""
    found: list[Form] = []

    def run(*place: Tensor) -> tuple[Tensor, ...]:
        score = mod(Score.of(Form(dtype)), *place)
        if not isinstance(score, Score):
            raise NotImplementedError("score_mod gives a value in which the score does not appear")
        found.append(score.form)
        present = (score.form.added, score.form.kept)
        return tuple(place[0] if tensor is None else tensor for tensor in present)

    added, kept = on_grid(run, grid)
    form = found[0]
    return replace(
        form,
        added=None if form.added is None else added.to(dtype),
        kept=None if form.kept is None else kept,
    )

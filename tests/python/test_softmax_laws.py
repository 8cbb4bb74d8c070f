"""The laws of the softmax state on tensors: the op ring_attention_update, and the merge of accelerators' steps.

A part is attention over some keys: [B, N, S, D] divided by its sum, with max and sum [B, N, S]; empty: 0, -inf, 0.
"""

from __future__ import annotations

import functools

import pytest
import torch
from npu_cases import EMPTY
from ringspan.device.rows import Partial, merge

import ringspan  # noqa: F401  registers the ops

BATCH, HEADS, ROWS, DIM = 2, 3, 7, 4


def update(one: Partial, other: Partial) -> Partial:
    """The contract's op: SBH, statistics in 8 slots, (-FLT_MAX, FLT_MAX) and anything in out for an empty row."""

    def arguments(part: Partial) -> tuple[torch.Tensor, ...]:
        empty = part.sum == 0
        out = part.out.masked_fill(empty.unsqueeze(-1), torch.nan).permute(2, 0, 1, 3).flatten(2)
        stats = part.max.masked_fill(empty, -float(EMPTY)), part.sum.masked_fill(empty, float(EMPTY))
        return out, *(x.unsqueeze(-1).expand(-1, -1, -1, 8).contiguous() for x in stats)

    out, row_max, row_sum = torch.ops.ringspan.ring_attention_update(*arguments(one), *arguments(other))
    row_max, row_sum = row_max[..., 0], row_sum[..., 0]
    empty = row_sum == float(EMPTY)
    assert torch.equal(empty, row_max == -float(EMPTY))
    out = out.unflatten(2, (HEADS, DIM)).permute(1, 2, 0, 3)
    return Partial(out, row_max.masked_fill(empty, -torch.inf), row_sum.masked_fill(empty, 0.0))


JOINS = {"ring_attention_update": update, "steps of accelerators": merge}
each_join = pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)


def keys(seed: int, count: int, shift: float = 0.0, empty: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [B, N, S, count] and values [B, N, count, D] in float64; the rows in `empty` keep none of them."""
    source = torch.Generator().manual_seed(seed)
    scores = torch.randn(BATCH, HEADS, ROWS, count, generator=source, dtype=torch.float64) * 3 + shift
    scores[:, :, list(empty)] = -torch.inf
    return scores, torch.randn(BATCH, HEADS, count, DIM, generator=source, dtype=torch.float64)


def attend(*parts: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype = torch.float64) -> Partial:
    """Attention over all keys of the parts at once."""
    scores, values = (torch.cat(x, dim) for x, dim in zip(zip(*parts, strict=True), (3, 2), strict=True))
    highest = scores.max(-1).values
    weight = torch.where(scores == -torch.inf, 0.0, torch.exp(scores - highest.nan_to_num(neginf=0.0).unsqueeze(-1)))
    total = weight.sum(-1)
    out = weight @ values / total.clamp(min=1e-300).unsqueeze(-1)
    return Partial(*(x.to(dtype) for x in (out, highest, total)))


def state(part: tuple[torch.Tensor, torch.Tensor]) -> Partial:
    return attend(part, dtype=torch.float32)


def check(got: Partial, want: Partial) -> None:
    for own, right in zip(got, want, strict=True):
        torch.testing.assert_close(own.double(), right, rtol=4e-6, atol=4e-6)


NOTHING = (torch.full((BATCH, HEADS, ROWS, 1), -torch.inf, dtype=torch.float64), keys(9, 1)[1])


@each_join
def test_the_identity_changes_nothing(join):
    part = state(keys(1, 5, empty=(2,)))
    for got in (join(part, state(NOTHING)), join(state(NOTHING), part)):
        for own, kept in zip(got, part, strict=True):
            torch.testing.assert_close(own, kept, rtol=3e-7, atol=0)


@each_join
def test_two_empty_rows_are_the_empty_row(join):
    got = join(state(NOTHING), state(NOTHING))
    assert (got.out == 0).all()
    assert (got.max == -torch.inf).all()
    assert (got.sum == 0).all()


@each_join
def test_parts_join_in_any_order_and_grouping(join):
    parts = [keys(1, 5, empty=(0,)), keys(2, 3, empty=(0, 3)), keys(3, 4, empty=(0, 1))]
    want = attend(*parts)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        first, second, third = (state(parts[i]) for i in order)
        check(join(join(first, second), third), want)
        check(join(first, join(second, third)), want)


@each_join
@pytest.mark.parametrize("shift", [120.0, -120.0, 1e4, -1e4])
def test_far_apart_maxima_stay_finite(join, shift):
    parts = [keys(1, 5), keys(2, 5, shift=shift)]
    check(join(*map(state, parts)), attend(*parts))
    check(functools.reduce(join, map(state, reversed(parts))), attend(*parts))


@each_join
def test_strided_states_hold_the_same_bits(join):
    one, other = state(keys(1, 5)), state(keys(2, 5, empty=(1,)))
    spread = Partial(*(x.transpose(0, 2).contiguous().transpose(0, 2) for x in other))
    for own, right in zip(join(one, spread), join(one, other), strict=True):
        assert torch.equal(own, right)


def test_a_row_of_nan_is_not_taken_for_an_empty_one():
    """A NaN among the scores leaves the maximum of a row at -inf and its sum NaN."""
    part = state(keys(1, 5))
    part.max[0, 0, 0], part.sum[0, 0, 0], part.out[0, 0, 0] = -torch.inf, torch.nan, torch.nan
    for other in (part, state(NOTHING), state(keys(2, 5))):
        for got in (merge(part, other), merge(other, part)):
            assert got.out[0, 0, 0].isnan().all()
            assert got.sum[0, 0, 0].isnan()
            assert got.out[1].isfinite().all()

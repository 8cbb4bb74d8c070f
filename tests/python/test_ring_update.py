"""ring_attention_update: the merge of two parts, empty rows, both layouts; case A20. Laws: test_softmax_laws.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from npu_cases import EMPTY

import ringspan  # noqa: F401  registers the ops

OPS = torch.ops.ringspan
SIZES = (6, 3, 4)  # rows, heads and head dim
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def part(seed, batch=2, dtype=torch.float32, empty=()):
    """out [S, B, H], max and sum [B, N, S, 8]; the rows in `empty` are empty, and hold NaN in out."""
    source, (rows, heads, dim) = torch.Generator().manual_seed(seed), SIZES
    out = torch.randn(rows, batch, heads * dim, generator=source).to(dtype)
    row_max = torch.randn(batch, heads, rows, 1, generator=source).mul(3).expand(-1, -1, -1, 8).clone()
    row_sum = torch.rand(batch, heads, rows, 1, generator=source).add(0.5).expand(-1, -1, -1, 8).clone()
    for row in empty:
        row_max[:, :, row], row_sum[:, :, row] = -float(EMPTY), float(EMPTY)
        out[row] = float("nan")
    return out, row_max, row_sum


def merged(one, other):
    """The right answer in float64, written down row by row."""
    heads = one[1].shape[1]
    outs = [x[0].double().unflatten(2, (heads, -1)).permute(1, 2, 0, 3).numpy() for x in (one, other)]
    maxima, sums = ([x[i][..., 0].double().numpy() for x in (one, other)] for i in (1, 2))
    empty = [(m <= -float(EMPTY)) & (s >= float(EMPTY)) for m, s in zip(maxima, sums, strict=True)]
    top = np.maximum(*maxima)
    shares = [
        np.where(gone, 0.0, np.where(gone, 0.0, s) * np.exp(np.minimum(m - top, 0)))
        for m, s, gone in zip(maxima, sums, empty, strict=True)
    ]
    total = shares[0] + shares[1]
    none = empty[0] & empty[1]
    out = sum(
        np.where(gone[..., None], 0.0, x * (share / np.where(total > 0, total, 1))[..., None])
        for x, share, gone in zip(outs, shares, empty, strict=True)
    )
    return np.where(none[..., None], 0.0, out), np.where(none, -EMPTY, top), np.where(none, EMPTY, total)


def check(results, right, dtype):
    out, row_max, row_sum = results
    heads = row_max.shape[1]
    assert out.dtype == dtype
    got = out.double().unflatten(2, (heads, -1)).permute(1, 2, 0, 3).numpy()
    assert np.abs(got - right[0]).max() <= LIMITS[dtype] * max(1.0, np.abs(right[0]).max())
    for x, want in ((row_max, right[1]), (row_sum, right[2])):
        assert torch.equal(x, x[..., :1].expand_as(x))
        assert np.allclose(x[..., 0].numpy(), want, rtol=2e-6)


@pytest.mark.parametrize("dtype", LIMITS)
def test_merge(dtype):
    one, other = part(1, dtype=dtype), part(2, dtype=dtype)
    before = [x.clone() for x in (*one, *other)]
    check(OPS.ring_attention_update(*one, *other), merged(one, other), dtype)
    for x, kept in zip((*one, *other), before, strict=True):
        assert torch.equal(x, kept)


def test_empty_rows_on_either_and_on_both_sides():
    one, other = part(1, empty=(0, 2)), part(2, empty=(1, 2))
    results = OPS.ring_attention_update(*one, *other)
    check(results, merged(one, other), torch.float32)
    out, row_max, row_sum = results
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert (row_max[:, :, 2] == -float(EMPTY)).all()
    assert (row_sum[:, :, 2] == float(EMPTY)).all()
    assert torch.equal(out[0], other[0][0])
    assert torch.equal(out[1], one[0][1])
    for x in results:
        assert x.isfinite().all()


def test_slots_stay_apart():
    one, other = part(1), part(2)
    one[2][..., 5] *= 3
    _, _, row_sum = OPS.ring_attention_update(*one, *other)
    assert not torch.equal(row_sum[..., 5], row_sum[..., 0])


def tnd_of(parts):
    """SBH parts of batch 1 as [T, N, D] and [T, N, 8]."""
    out, row_max, row_sum = parts
    heads = row_max.shape[1]
    return (
        out[:, 0].unflatten(1, (heads, -1)).contiguous(),
        *(x[0].transpose(0, 1).contiguous() for x in (row_max, row_sum)),
    )


def by_documents(x, ends):
    """[T, N, 8] in the order of documents, each [N, S, 8]."""
    runs = [x[begin:end].transpose(0, 1).reshape(-1) for begin, end in itertools.pairwise(ends)]
    return torch.cat(runs).view(x.shape)


@pytest.mark.parametrize("ends", [(0, 6), (0, 2, 2, 5, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_packed_documents(ends):
    one, other = part(1, batch=1, empty=(4,)), part(2, batch=1)
    right = tnd_of(OPS.ring_attention_update(*one, *other))
    lengths = torch.tensor(ends)
    true_order = OPS.ring_attention_update(
        *tnd_of(one), *tnd_of(other), actual_seq_qlen=lengths, input_layout="TND", input_softmax_layout="TND"
    )
    for x, want in zip(true_order, right, strict=True):
        assert torch.equal(x, want)
    for name in ("", "SBH"):
        stored = [(x[0], *(by_documents(y, ends) for y in x[1:])) for x in (tnd_of(one), tnd_of(other))]
        results = OPS.ring_attention_update(
            *stored[0], *stored[1], actual_seq_qlen=lengths, input_layout="TND", input_softmax_layout=name
        )
        assert torch.equal(results[0], right[0])
        for x, want in zip(results[1:], right[1:], strict=True):
            assert torch.equal(x, by_documents(want, ends))


def test_nothing_gives_nothing():
    out, stats = torch.zeros(0, 2, 12), torch.zeros(2, 3, 0, 8)
    results = OPS.ring_attention_update(out, stats, stats, out, stats, stats)
    assert [tuple(x.shape) for x in results] == [(0, 2, 12), (2, 3, 0, 8), (2, 3, 0, 8)]


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_a20_statistics_of_an_npu(layout, pieces):
    """lse = max + ln(sum) of replicated statistics; parts of a mock ring merge to the whole, empty rows too."""
    source = torch.Generator().manual_seed(20)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=source) for _ in range(3))
    masked = torch.ones(16, 16, dtype=torch.bool).triu(1)
    masked[5] = True
    shape = (lambda x: x) if layout == "BNSD" else (lambda x: x[0].transpose(0, 1))

    def run(columns):
        lengths = {} if layout == "BNSD" else {
            "actual_seq_qlen": torch.tensor([16]), "actual_seq_kvlen": torch.tensor([columns.stop - columns.start]),
            "softmax_layout": "TND",
        }  # fmt: skip
        return OPS.fusion_attention_v3(
            shape(q), shape(k[:, :, columns]), shape(v[:, :, columns]), 2, layout, scale=0.3, sparse_mode=1,
            atten_mask=masked[:, columns].contiguous(), **lengths,
        )[:3]  # fmt: skip

    def to_update(out, row_max, row_sum):
        return (out, row_max, row_sum) if layout == "TND" else (out.permute(2, 0, 1, 3).flatten(2), row_max, row_sum)

    step = 16 // pieces
    total = to_update(*run(slice(0, step)))
    extra = {} if layout == "BNSD" else {
        "input_layout": "TND", "input_softmax_layout": "TND", "actual_seq_qlen": torch.tensor([0, 16]),
    }  # fmt: skip
    for begin in range(step, 16, step):
        total = OPS.ring_attention_update(*total, *to_update(*run(slice(begin, begin + step))), **extra)
    whole = to_update(*run(slice(0, 16)))
    torch.testing.assert_close(total[0], whole[0], atol=2e-6, rtol=1e-5)
    score = 0.3 * (q.double() @ k.double().mT)
    right = torch.logsumexp(score.masked_fill(masked, -torch.inf), -1)
    for results in (total, whole):
        row_max, row_sum = (x[..., 0] if layout == "BNSD" else x[..., 0].transpose(0, 1)[None] for x in results[1:])
        empty = (row_max == -float(EMPTY)) & (row_sum == float(EMPTY))
        assert empty[:, :, 5].all()
        assert int(empty.sum()) == 2
        lse = torch.where(empty, -torch.inf, row_max.double() + row_sum.double().log())
        torch.testing.assert_close(lse, right, atol=2e-6, rtol=1e-6)
        assert results[0].isfinite().all()

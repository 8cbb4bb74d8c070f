"""Masks: their encoding (docs/decisions/call-description.md), their refusals, and the pairs that they keep."""

import itertools

import oracle
import pytest
import torch
from cases import mask_of
from ringspan.masks import Frame

import ringspan as rs

SQUARE = Frame(8, 8, False)


def encoded(mask, frame=SQUARE):
    tables = []
    return mask.encode(frame, tables), [table.tolist() for table in tables]


@pytest.mark.parametrize(
    ("mask", "words", "tables"),
    [
        (rs.full(), [0], []),
        (rs.causal(), [1, 1], []),
        (rs.causal("bottom_right"), [1, 2], []),
        (rs.window(3), [2, 3, 0, 1], []),
        (rs.window(None, 2, "bottom_right"), [2, -1, 2, 2], []),
        (rs.chunked(4), [3, 4, 1], []),
        (rs.prefix([2, 3]), [4, 0, 1], [[2, 3]]),
        (rs.prefix(2), [4, 0, 1], [[2]]),
        (rs.documents(lengths=[3, 5]), [5, 0, 1, 0, 0, 0], [[[3, 5]]]),
        (rs.documents(lengths=[[3, 5], [8]]), [5, 0, 1, 0, 0, 0], [[[3, 5], [8, 0]]]),
        (rs.documents(ids=[1] * 8, inside=rs.full()), [6, 0, 0, 0, 0, 0], [[[1] * 8]]),
        (rs.documents(lengths=[8], inside=rs.window(2, 1)), [5, 0, 2, 2, 1, 0], [[[8]]]),
        (rs.documents(lengths=[8], inside=rs.chunked(3)), [5, 0, 3, 0, 0, 3], [[[8]]]),
        (rs.bands([(0, 1, 2, 3, None, 0)]), [7, 0], [[[0, 1, 2, 3, -(1 << 60), 0]]]),
        (rs.bands([]), [7, 0], [[]]),
        (rs.causal() & rs.window(2), [1, 1, 2, 2, 0, 1, 8], []),
        ((rs.full() | rs.prefix(1)) & rs.bands([]), [0, 4, 0, 1, 9, 7, 1, 8], [[1], []]),
    ],
)
def test_encoding(mask, words, tables):
    assert encoded(mask) == (words, tables)


def test_tables_are_int64_on_the_cpu_and_keep_no_gradient():
    tables = []
    rs.documents(lengths=torch.tensor([3, 5], dtype=torch.int32)).encode(SQUARE, tables)
    assert tables[0].dtype == torch.int64
    assert tables[0].device.type == "cpu"


def test_positions_from_maps_decide_the_corner():
    assert encoded(rs.causal(), Frame(4, 8, True))[0] == [1, 1]


@pytest.mark.parametrize("mask", [rs.causal(), rs.window(2), rs.chunked(2), rs.prefix(2)])
def test_different_lengths_need_align(mask):
    with pytest.raises(ValueError, match=r"4 queries and 8 keys.*align"):
        encoded(mask, Frame(4, 8, False))


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: rs.causal("middle"), "middle"),
        (lambda: rs.window(-2), "-2"),
        (lambda: rs.window(1.5), "1.5"),
        (lambda: rs.window(1, True), "True"),
        (lambda: rs.chunked(0), "0"),
        (lambda: rs.prefix([[1]]), r"\[1, 1\]"),
        (lambda: rs.prefix([]), r"\[0\]"),
        (lambda: rs.prefix(["a"]), "'a'"),
        (lambda: rs.prefix(torch.tensor([1.0])), "float32"),
        (lambda: rs.documents(), "neither"),
        (lambda: rs.documents(lengths=[1], ids=[1]), "both"),
        (lambda: rs.documents(ids=[[1, 2], [1]]), "one length"),
        (lambda: rs.documents(lengths=[1], inside=rs.prefix(1)), "inside"),
        (lambda: rs.documents(lengths=[1], inside=rs.causal("top_left")), "align"),
        (lambda: rs.bands([(0, 1, 0, 1)]), "4 numbers"),
        (lambda: rs.bands(torch.zeros(2, 5, dtype=torch.int64)), r"\[2, 5\]"),
        (lambda: rs.causal() & 1, "int"),
        (lambda: rs.causal() | None, "NoneType"),
        (lambda: encoded(rs.documents(ids=[1, 2]))[0], "2 positions.*8"),
        (lambda: encoded(rs.documents(lengths=[4]), Frame(4, 8, True)), "4 positions.*8"),
    ],
)
def test_refusals_name_the_value(make, pattern):
    with pytest.raises(ValueError, match=pattern):
        make()


def kept_pairs(mask, q_len, kv_len):
    """The pairs that a call keeps, read off its gradients: v of key j reaches out of query i."""
    q, k = torch.zeros(1, 1, q_len, 1), torch.zeros(1, 1, kv_len, 1)
    out = rs.attention(q, k, torch.eye(kv_len)[None, None], mask=mask)
    return out[0, 0] > 0


def test_every_mask_keeps_the_pairs_of_its_inequality():
    q, k = 9, 9
    corners = ("top_left", "bottom_right")
    rules = [("full",), *[("causal", corner) for corner in corners], ("chunked", 4), ("prefix", (5,))]
    rules += [("window", left, right) for left, right in itertools.product((None, 0, 3), (None, 0, 2))]
    rules += [
        ("ids", (1, 1, 0, 2, 2, 1, 3, 3, 0), inside)
        for inside in (("full",), ("causal",), ("window", 1, 1), ("chunked", 2))
    ]
    rules += [("bands", ((0, 5, 1, 9, -2, 3), (2, 9, 0, 3, None, None)))]
    rules += [(both, one, two) for both in ("and", "or") for one, two in itertools.combinations(rules[:8], 2)]
    for rule in rules:
        assert kept_pairs(mask_of(rule), q, k).tolist() == oracle.keep_of(rule, q, k)[0].tolist(), rule


@pytest.mark.parametrize(("q_len", "kv_len"), [(4, 9), (9, 4)])
def test_corners_of_rectangles(q_len, kv_len):
    for corner in ("top_left", "bottom_right"):
        for rule in (("causal", corner), ("window", 2, 1, corner)):
            expected = oracle.keep_of(rule, q_len, kv_len)[0].tolist()
            assert kept_pairs(mask_of(rule), q_len, kv_len).tolist() == expected, rule


def test_lengths_may_change_in_place_of_new_masks():
    lengths = torch.tensor([3, 5])
    mask = rs.documents(lengths=lengths)
    before = kept_pairs(mask, 8, 8)
    lengths.copy_(torch.tensor([5, 3]))
    assert not torch.equal(before, kept_pairs(mask, 8, 8))
    assert torch.equal(kept_pairs(mask, 8, 8), kept_pairs(rs.documents(lengths=[5, 3]), 8, 8))

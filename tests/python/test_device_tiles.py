"""Tiles against what an accelerator is asked for: the pairs of a mode, a mask or a part are the tile's own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from npu_cases import kept
from ringspan.device.tiles import COMPRESSED, Tile, flash_parts, mask_parts, read_tiles, sparse_mode_of

OPEN = 2**40


def tile(rows, columns, lo, hi, strides=(1, 1), begins=(0, 0)):
    """strides, begins: of the positions of rows and of columns."""
    return Tile(0, 3, rows, begins[0], strides[0], 5, columns, begins[1], strides[1], lo, hi)


TILES = {
    "full": tile(5, 7, -OPEN, OPEN),
    "full, cut by nothing": tile(5, 7, -4, 6),
    "causal, top left": tile(6, 6, -OPEN, 0),
    "causal, top left, wide": tile(5, 4, -OPEN, 0),
    "causal, bottom right": tile(4, 7, -OPEN, 3),
    "causal by positions": tile(5, 5, -OPEN, 0, begins=(40, 40)),
    "window": tile(9, 9, -2, 0),
    "window on both sides": tile(9, 9, -3, 2),
    "window, rows before": tile(4, 9, 2, 5),
    "right side only": tile(6, 6, 0, OPEN),
    "one diagonal": tile(5, 5, 0, 0),
    "below the corner": tile(8, 5, -5, -1),
    "equal strides": tile(6, 6, -OPEN, 0, (3, 3), (2, 1)),
    "equal strides, edges": tile(6, 6, -OPEN, 0, (3, 3), (1, 2)),
    "equal strides, window": tile(6, 6, -7, 5, (3, 3), (1, 0)),
    "unequal strides": tile(6, 4, -OPEN, 0, (2, 3)),
    "unequal strides with an empty row": tile(6, 2, 0, 0, (1, 4)),
    "single row": tile(1, 7, -OPEN, OPEN),
    "single column": tile(7, 1, -OPEN, 0),
    "empty": tile(5, 5, 9, 20),
    "no rows": tile(0, 5, -OPEN, OPEN),
}


def pairs_of(one):
    """The definition, pair by pair."""
    found = np.zeros((one.q_rows, one.kv_rows), bool)
    for a, c in itertools.product(range(one.q_rows), range(one.kv_rows)):
        found[a, c] = one.lo <= (one.kv_pos0 + c * one.kv_stride) - (one.q_pos0 + a * one.q_stride) <= one.hi
    return found


@pytest.mark.parametrize("name", TILES)
def test_the_mode_means_the_tile(name):
    one, right = TILES[name], pairs_of(TILES[name])
    mode = sparse_mode_of(one)
    if not right.any():
        assert mode is None
        return
    if mode.atten_mask is None:
        assert mode.sparse_mode == 0
        found = np.ones_like(right)
    elif mode.sparse_mode == 1:
        found = ~mode.atten_mask.numpy()
    else:
        assert mode.atten_mask.shape == (COMPRESSED, COMPRESSED)
        assert torch.equal(mode.atten_mask, torch.ones(COMPRESSED, COMPRESSED).triu(1).bool())
        found = kept(mode.sparse_mode, one.q_rows, one.kv_rows, mode.pre_tockens, mode.next_tockens)
    np.testing.assert_array_equal(found, right)


def test_the_named_modes_are_used():
    modes = {name: sparse_mode_of(one) for name, one in TILES.items()}
    assert modes["full"].sparse_mode == 0
    assert modes["causal, top left"].sparse_mode == 2
    assert modes["causal, bottom right"].sparse_mode == 3
    assert modes["window"].sparse_mode == 4
    assert modes["equal strides, window"].sparse_mode == 4
    assert modes["unequal strides"].sparse_mode == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_tiles(seed):
    draw = np.random.default_rng(seed)
    strides = [int(x) for x in draw.integers(1, 4, 2)]
    if seed % 2:
        strides[1] = strides[0]
    low = int(draw.integers(-12, 8))
    rows, columns = (int(x) for x in draw.integers(1, 12, 2))
    high = low + int(draw.integers(0, 15))
    one = tile(rows, columns, low, high, strides, [int(x) for x in draw.integers(0, 9, 2)])
    right, mode = pairs_of(one), sparse_mode_of(one)
    np.testing.assert_array_equal(one.keep().numpy(), right)
    if right.any() and one.band() is not None:
        assert one.has_empty_rows() or right.any(1).all()
        found = (
            np.ones_like(right)
            if mode.atten_mask is None
            else kept(mode.sparse_mode, one.q_rows, one.kv_rows, mode.pre_tockens, mode.next_tockens)
        )
        np.testing.assert_array_equal(found, right)
    _check_parts(one, right)


@pytest.mark.parametrize("name", TILES)
def test_parts_are_disjoint_and_complete(name):
    _check_parts(TILES[name], pairs_of(TILES[name]))


def _check_parts(one, right):
    parts = flash_parts(one)
    if parts is not None and right.size:
        found = np.zeros(right.shape, int)
        for part, is_causal in parts:
            assert not is_causal or part.q_rows == part.kv_rows
            own = kept(2 if is_causal else 1, part.q_rows, part.kv_rows)
            np.testing.assert_array_equal(own, pairs_of(part))
            _add(found, one, part, own)
        np.testing.assert_array_equal(found, right)
    found = np.zeros(right.shape, int)
    for part in mask_parts(one):
        _add(found, one, part, pairs_of(part))
    np.testing.assert_array_equal(found, right)


def _add(found, one, part, own):
    row, column = part.q_row0 - one.q_row0, part.kv_row0 - one.kv_row0
    found[row : row + part.q_rows, column : column + part.kv_rows] += own


def test_lower_open_bands_need_no_mask():
    for name in ("full", "causal, top left", "causal, top left, wide", "causal, bottom right", "equal strides"):
        assert flash_parts(TILES[name]) is not None
    for name in ("window", "unequal strides", "right side only"):
        assert flash_parts(TILES[name]) is None


def test_long_masks_come_in_blocks():
    one = tile(3000, 3000, -100, 0)
    parts = list(mask_parts(one))
    assert len(parts) == 3
    assert all(part.kv_rows <= 1024 + 100 for part in parts)


def test_batch_entries_are_joined():
    words = [[b, 0, 4, 0, 1, 0, 4, 0, 1, -9, 0] for b in (0, 1, 2, 4)] + [[1, 4, 2, 0, 1, 0, 4, 0, 1, -9, 0]]
    tiles = read_tiles(torch.tensor(words))
    assert [(one.batch, one.batches, one.q_row0) for one in tiles] == [(0, 3, 0), (1, 1, 4), (4, 1, 0)]

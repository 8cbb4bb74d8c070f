"""The grid of ranks, without processes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs


def test_groups_of_the_picture():
    mesh = rs.rank_mesh(8, tp=2, cp=2, dp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert set(mesh.groups("cp")) == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert set(mesh.groups("dp")) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert mesh.coordinates(6) == {"dp": 1, "cp": 1, "ulysses": 0, "tp": 0}
    assert mesh.group_of(5, "cp") == (5, 7)
    assert str(mesh) == "dp 2 x cp 2 x tp 2"


def test_four_ranks_of_two_by_two():
    mesh = rs.rank_mesh(4, tp=2, cp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3))
    assert mesh.groups("cp") == ((0, 2), (1, 3))


def test_a_sequence_spans_ring_and_ulysses():
    mesh = rs.rank_mesh(8, cp=2, ulysses=2, tp=2)
    assert mesh.groups("ulysses") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("cp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("sequence") == ((0, 2, 4, 6), (1, 3, 5, 7))


DEGREES = st.integers(1, 4)


@given(DEGREES, DEGREES, DEGREES, DEGREES)
def test_every_rank_is_in_one_group_of_each_kind(dp, cp, ulysses, tp):
    mesh = rs.rank_mesh(dp * cp * ulysses * tp, dp=dp, cp=cp, ulysses=ulysses, tp=tp)
    degrees = {"dp": dp, "cp": cp, "ulysses": ulysses, "tp": tp, "sequence": cp * ulysses}
    for kind, degree in degrees.items():
        groups = mesh.groups(kind)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world))
        assert {len(group) for group in groups} == {degree}
        for group in groups:
            for place, rank in enumerate(group):
                at = mesh.coordinates(rank)
                assert place == (at["cp"] * ulysses + at["ulysses"] if kind == "sequence" else at[kind])


@pytest.mark.parametrize(
    ("world", "degrees", "words"),
    [
        (8, {"tp": 2, "cp": 2}, ["is 4", "8 ranks"]),
        (4, {"tp": 2, "cp": 2, "dp": 2}, ["is 8", "4 ranks"]),
        (4, {"tp": 0, "cp": 4}, ["tp is 0", "at least 1"]),
        (4, {"tp": -2, "cp": -2}, ["is -2"]),
        (4, {"cp": 4.0}, ["cp is 4.0", "whole number"]),
        (1, {"cp": True}, ["cp is True"]),
        (0, {}, ["world is 0"]),
        ("4", {"cp": 4}, ["world is '4'"]),
    ],
)
def test_degrees_that_do_not_fit(world, degrees, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked one by one
        rs.rank_mesh(world, **degrees)
    assert all(word in str(error.value) for word in words), error.value


def test_ranks_and_kinds_that_do_not_exist():
    mesh = rs.rank_mesh(4, cp=4)
    with pytest.raises(ValueError, match="rank 4 is outside a world of 4 ranks"):
        mesh.coordinates(4)
    with pytest.raises(ValueError, match="rank -1 is outside"):
        mesh.group_of(-1, "cp")
    with pytest.raises(ValueError, match="kind is 'pp'; give one of dp, cp, ulysses, tp, sequence"):
        mesh.groups("pp")

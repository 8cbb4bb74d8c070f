"""Threads of a rank that share a group: forwards belong to one of them, and no order is wrong in silence."""

from __future__ import annotations

import re

import pytest
from pool import Fresh
from trials import faults_of_refusal

GROUPS = Fresh(8, count=2)
KINDS = ["forward", "unshard", "loss"]


@pytest.mark.parametrize("on_all", [False, True])
def test_another_thread_is_refused_on_every_rank(pool, on_all):
    answers = pool.run("thread_jobs:second_thread", 3, fresh=GROUPS, kinds=KINDS, on_all=on_all)
    for kind in KINDS:
        told = [found[kind] for found in answers]
        words = [r"thread \d+ \(the other\) calls in group", r"made by thread \d+ \(MainThread\)", "hand_over"]
        faults = faults_of_refusal(told, words)
        assert not faults, f"{kind}: {faults}"
        if not on_all:
            assert all(f"rank 1 refused call {one.calls} " in one.message for one in (told[0], told[2])), told


def test_the_thread_that_began_is_the_owner_after_its_end(pool):
    """Systems give the number of a thread that has ended to the next one."""
    answers = pool.run("thread_jobs:threads_one_after_another", 2, fresh=GROUPS, hand_over=False)
    for found in answers:
        for count, told in enumerate(found):
            assert told.kind == "ValueError", told
            assert re.search(rf"\(thread {count}\) calls in group .* made by thread \d+ \(the first\)", told.message), (
                told
            )


def test_each_thread_after_a_hand_over(pool):
    answers = pool.run("thread_jobs:threads_one_after_another", 2, fresh=GROUPS, hand_over=True)
    for found in answers:
        assert [told.kind for told in found] == [None] * 4, found
        assert max(told.next_error for told in found) < 1e-5


def test_a_group_goes_to_another_thread_and_back(pool):
    assert max(max(errors) for errors in pool.run("thread_jobs:handed_over", 3, fresh=Fresh(8))) < 1e-5


@pytest.mark.parametrize("checkpoints", [False, True])
def test_backward_comes_from_any_thread(pool, checkpoints):
    answers = pool.run("thread_jobs:backward_elsewhere", 3, fresh=Fresh(8), checkpoints=checkpoints)
    assert max(max(errors) for errors in answers) < 1e-5


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_crossed_orders_are_never_wrong_in_silence(pool, world, overlap):
    """What a first call returned may be of the other thread's tensors; then the second call raises on every rank."""
    answers = pool.run("thread_jobs:crossed", world, fresh=Fresh(8), overlap=overlap, rounds=12)
    for count, ranks in enumerate(zip(*answers, strict=True)):
        wrong = [(rank, name) for rank, ends in enumerate(ranks) for name in "ab" if ends[name].error > 1e-5]
        quiet = [rank for rank, ends in enumerate(ranks) if all(ends[name].kind is None for name in "ab")]
        assert not (wrong and quiet), f"round {count}: wrong on {wrong}, and nothing was raised on {quiet}"
        assert wrong or overlap, "the order was the same, which shows nothing"
        # Whatever the order was, the second thread of each rank is refused.
        assert not quiet, f"round {count}: two threads have made calls on {quiet}"
        assert all(ends[name].kind in (None, "ValueError") for ends in ranks for name in "ab"), ranks


def test_a_group_for_each_thread(pool):
    for ends in pool.run("thread_jobs:two_forwards_at_once", 2, fresh=GROUPS, seconds=1.0):
        for end in ends:
            assert end.kind is None, end
            assert end.error < 1e-5

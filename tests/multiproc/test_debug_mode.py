"""RINGSPAN_DEBUG=1: calls of equal arguments from other places, and rows that are shared and differ, are found."""

from __future__ import annotations

import pytest
from pool import Fresh
from trials import EXACT, faults_of_group, faults_of_refusal

GROUPS = Fresh(8, count=2)
MANY = Fresh(8, count=6)

PLACES = {"attention": ("first", "second"), "unshard": ("first_unshard", "second_unshard")}


@pytest.mark.parametrize("what", PLACES)
@pytest.mark.parametrize("way", ["skipped", "swapped"])
def test_a_call_out_of_step_is_refused_with_both_places(pool, way, what):
    answers = pool.run("debug_jobs:out_of_step", 3, fresh=GROUPS, what=what, way=way, debug=True)
    one, other = (
        rf"debug_jobs:{name}\+\d on {ranks}" for name, ranks in zip(PLACES[what], ("ranks 0, 2", "rank 1"), strict=True)
    )
    faults = faults_of_refusal([told for told, _ in answers], ["place of the call is", one, other])
    assert not faults, faults
    assert [error for _, error in answers] == [0.0] * 3, "nothing was returned"


@pytest.mark.parametrize("way", ["skipped", "swapped"])
def test_without_it_they_are_paired_as_they_come(pool, way):
    """As docs/agreement.md says: results are wrong, and nothing is raised."""
    answers = pool.run("debug_jobs:out_of_step", 3, fresh=GROUPS, what="attention", way=way, debug=False)
    faults = faults_of_group([told for told, _ in answers])
    assert not faults, faults
    assert all(told.kind is None for told, _ in answers), answers
    # Rank 1 has the first call's result no more where it skipped that.
    assert all(answers[rank][1] > 1e-2 for rank in ((0, 1, 2) if way == "swapped" else (0, 2))), answers


def test_on_one_rank_alone_it_is_refused(pool):
    kinds = ["forward", "backward", "unshard"]
    answers = pool.run("debug_jobs:on_one_rank", 3, fresh=GROUPS, kinds=kinds)
    for kind in kinds:
        faults = faults_of_refusal(
            [found[kind] for found in answers], ["RINGSPAN_DEBUG is 0 on ranks 0, 2, 1 on rank 1"]
        )
        assert not faults, f"{kind}: {faults}"


def test_good_calls_go_on(pool):
    """Compiled code has no place, which is equal to every other."""
    assert max(max(errors) for errors in pool.run("debug_jobs:good_calls", 3, fresh=Fresh(8))) < 1e-5


def test_a_rank_without_a_place_hides_no_difference(pool):
    told = pool.run("debug_jobs:compiled_beside_two_places", 3, fresh=GROUPS)
    faults = faults_of_refusal(told, [r"debug_jobs:first\+1 on rank 1", r"debug_jobs:second\+1 on rank 2"], seconds=8)
    assert not faults, faults


ROWS = ["bool attn_mask", "float attn_mask", "bias", "bias of heads", "a single axis"]
CONTENT = [
    ("attention", "auto", ROWS),
    ("attention", "gather", ROWS[1:3]),
    ("attention", "ulysses", ROWS[1:3]),
    ("DTensors", "auto", ROWS[:3]),
    ("contract", "auto", ["bias of heads"]),
]


@pytest.mark.parametrize(("front", "schedule", "whats"), CONTENT)
def test_another_content_of_a_shared_row_is_refused(pool, front, schedule, whats):
    answers = pool.run(
        "debug_jobs:other_content", 2, fresh=MANY, front=front, whats=whats, schedule=schedule, debug=True
    )
    kinds = ("RuntimeError",) if front == "contract" else ("ValueError",)
    for what in whats:
        name = "attn_mask" if what == "bool attn_mask" else "bias"  # which a float mask is
        words = [rf"content of {name}, one row for all queries, is of hash \d+ on rank 0, of hash \d+ on rank 1"]
        faults = faults_of_refusal([found[what] for found in answers], words, kinds)
        assert not faults, f"{what}: {faults}"


def test_without_it_each_rank_takes_its_own_row(pool):
    answers = pool.run(
        "debug_jobs:other_content", 2, fresh=MANY, front="attention", whats=ROWS, schedule="auto", debug=False
    )
    for what in ROWS:
        told = [found[what] for found in answers]
        assert [one.kind for one in told] == [None, None], told
        assert not faults_of_group(told)


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
@pytest.mark.parametrize("what", ["bool attn_mask", "bias"])
@pytest.mark.parametrize("lengths", [[5, 0, 1, 6], [0, 1, 0, 7], [1, 1, 1, 1]])
def test_ranks_with_no_row_and_one_row_take_part(pool, lengths, what, schedule):
    answers = pool.run(
        "debug_jobs:content_on_few_rows", 4, fresh=GROUPS, lengths=lengths, what=what, schedule=schedule, odd=None
    )
    faults = faults_of_group([told for told, _ in answers])
    assert not faults, faults
    for told, error in answers:
        assert told.kind is None, told
        assert error < EXACT


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_a_difference_is_found_beside_ranks_of_few_rows(pool, odd):
    """Rank 2 has one row: that it cannot tell hides nothing of the others."""
    answers = pool.run(
        "debug_jobs:content_on_few_rows", 4, fresh=GROUPS, lengths=[5, 0, 1, 6], what="bias", schedule="ring", odd=odd
    )
    faults = faults_of_refusal([told for told, _ in answers], ["content of bias, one row for all queries"])
    assert not faults, faults

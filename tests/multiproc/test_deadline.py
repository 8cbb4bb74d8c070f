"""How long a rank waits for its peers, and what may happen meanwhile: deadlines, warnings, Ctrl-C, other threads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import thread_ranks
import waiting_jobs
from pool import Fresh
from trials import faults_of_group, faults_of_refusal

import ringspan as rs

TIMEOUT_S = 8.0  # of the groups; whatever is told must not take that long
DEADLINE_S = 0.5
MARGIN_S = 1.0  # within which a deadline is kept
GROUPS = Fresh(TIMEOUT_S, count=2)
PEER_ERROR = "DistBackendError"
WAITS = [("agreement", "auto"), ("exchange", "all_to_all"), ("exchange", "p2p")]


def assert_fine(told):
    faults = faults_of_group(told, seconds=float("inf"))
    assert not faults, faults


def assert_given_up(told, world, waits_s):
    """Who waited gave up in time and names the last rank; that one raises for the same call; the group lives."""
    assert_fine(told)
    *waited, late = told
    for rank, one in enumerate(waited):
        assert one.kind == PEER_ERROR, f"rank {rank}: {one}"
        assert waits_s - 0.05 <= one.seconds <= waits_s + MARGIN_S, f"rank {rank} waited {one.seconds} s"
        assert re.search(rf"waited for rank {world - 1} in call \d+ \(before step 0\) for", one.message), one.message
    assert late.kind == PEER_ERROR
    assert late.seconds < MARGIN_S
    numbers = {re.search(r"in call (\d+)", one.message).group(1) for one in told}
    assert len(numbers) == 1, [one.message for one in told]


def test_a_deadline_is_kept_in_every_call(pool):
    answers = pool.run(
        "waiting_jobs:one_is_absent", 3, fresh=GROUPS, deadline_s=DEADLINE_S, how="set_deadline",
        kinds=list(waiting_jobs.CALLS), waits_s=DEADLINE_S,
    )  # fmt: skip
    for kind in waiting_jobs.CALLS:
        assert_given_up([found[kind] for found in answers], 3, DEADLINE_S)


def test_the_variable_is_kept(pool):
    answers = pool.run(
        "waiting_jobs:one_is_absent", 2, fresh=GROUPS, deadline_s=DEADLINE_S, how="variable", kinds=["forward"],
        waits_s=DEADLINE_S,
    )  # fmt: skip
    assert_given_up([found["forward"] for found in answers], 2, DEADLINE_S)


def test_without_a_deadline_the_timeout_holds(pool):
    answers = pool.run(
        "waiting_jobs:one_is_absent", 2, fresh=Fresh(1.5, count=2), deadline_s=None, how="set_deadline",
        kinds=["forward"], waits_s=1.5,
    )  # fmt: skip
    assert_given_up([found["forward"] for found in answers], 2, 1.5)


def test_what_is_set_goes_before_the_variable(pool):
    answers = pool.run("waiting_jobs:set_deadline_goes_first", 2, fresh=GROUPS, seconds=DEADLINE_S)
    assert_given_up(answers, 2, DEADLINE_S)


@pytest.mark.parametrize("how", ["set_deadline", "variable"])
@pytest.mark.parametrize("on_all", [False, True])
def test_a_deadline_beyond_the_timeout_is_refused_on_every_rank(pool, how, on_all):
    kinds = [*waiting_jobs.CALLS, "backward of unshard"]
    answers = pool.run(
        "waiting_jobs:bad_deadlines", 3, fresh=GROUPS, how=how, seconds=[9.5], on_all=on_all, kinds=kinds
    )
    for name in answers[0]:
        faults = faults_of_refusal([found[name] for found in answers], [r"\b9\.5 s", r"\b8 s"], seconds=MARGIN_S)
        assert not faults, f"{name}: {faults}"


def test_a_deadline_may_be_as_long_as_the_timeout(pool):
    job = "waiting_jobs:a_deadline_as_long_as_the_timeout"
    assert max(pool.run(job, 2, fresh=Fresh(TIMEOUT_S), seconds=TIMEOUT_S)) < 1e-5


@pytest.mark.parametrize("on_all", [False, True])
def test_a_variable_that_is_no_time_is_refused_on_every_rank(pool, on_all):
    values = ["abc", "-1", "0", "nan", "inf", "1e999", "3 s"]
    answers = pool.run(
        "waiting_jobs:bad_deadlines", 2, fresh=GROUPS, how="variable", seconds=values, on_all=on_all, kinds=["forward"]
    )
    for value in values:
        words = ["RINGSPAN_DEADLINE", f'"{value}"']
        faults = faults_of_refusal([found[f"forward, {value}"] for found in answers], words, seconds=MARGIN_S)
        assert not faults, f"{value}: {faults}"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "5", True, 10**400, 1e300, [1.0]])
def test_what_is_no_time_is_not_set(seconds):
    with pytest.raises(ValueError, match="deadline is"):
        rs.set_deadline(seconds)


@pytest.mark.parametrize(("backward", "exchange"), [(False, "p2p"), (True, "all_to_all")])
def test_a_step_longer_than_the_deadline_ends_the_group(pool, backward, exchange):
    """The rank that computes is named, by the others and by itself."""
    answers = pool.run(
        "waiting_jobs:one_is_slow", 3, fresh=GROUPS, deadline_s=1.6, pauses=[2.9], backward=backward, exchange=exchange
    )
    for rank, (told, _) in enumerate(answers):
        assert told.kind == PEER_ERROR, f"rank {rank}: {told}"
        assert "peer 2 in call" in told.message, told.message
        assert "rank 2 showed no sign of progress for 1.6 s" in told.message
        assert "The group is closed" in told.message
        # The next call found another group.
        assert told.next_error == float("inf")
        assert rank == 2 or 1.55 <= told.seconds <= 1.6 + MARGIN_S, told


def test_time_counts_without_progress(pool):
    """The last rank has two steps more to go than its peers, who are in the next call's agreement: 5 s in all."""
    answers = pool.run(
        "waiting_jobs:one_is_slow", 4, fresh=GROUPS, deadline_s=4.5, pauses=[0.0, 0.0, 2.5, 2.5], backward=False,
        exchange="all_to_all",
    )  # fmt: skip
    assert_fine([told for told, _ in answers])
    for rank, (told, error) in enumerate(answers):
        assert told.kind is None, f"rank {rank}: {told}"
        assert told.seconds > 4.7
        assert error < 1e-5


@pytest.mark.parametrize(("place", "exchange"), WAITS)
def test_a_long_wait_is_warned_of(pool, place, exchange):
    answers = pool.run(
        "waiting_jobs:warned", 3, fresh=GROUPS, pause_s=1.5, times=(0.3, 0.5), place=place, exchange=exchange
    )
    assert_fine([told for told, _ in answers])
    assert answers[2][1] == []
    for rank, (_, texts) in enumerate(answers[:2]):
        # After 0.3, 0.8 and 1.3 s; a busy machine may skip one.
        assert 2 <= len(texts) <= 3, texts
        for text in texts:
            assert re.match(rf"rank {rank} waits for .* in call 3 of group ", text), text
            assert re.search(r"for \d+ s by now; it gives up after 8 s without a sign of progress", text), text
            number = 2 if place == "agreement" else 3
            last = rf"Last calls .*{number} \(forward, waiting_jobs:Attention.forward\+1\) on ranks 0, 1, 2"
            assert re.search(last, text), text
        waits = [text.split(" in call")[0] for text in texts]
        assert f"rank {rank} waits for rank 2" in waits, texts
        if place == "exchange":
            assert re.search(r"\(step \d, waiting for k and v of rank \d from rank \d to rank \d\)", texts[-1]), texts


PLACES = [
    ("agreement", "forward", "auto"),
    ("agreement", "backward", "auto"),
    *(("exchange", kind, exchange) for kind in ("forward", "backward") for exchange in ("all_to_all", "p2p")),
]


@pytest.mark.parametrize(("place", "kind", "exchange"), PLACES)
def test_a_waiting_rank_is_interrupted(pool, place, kind, exchange):
    """At once, and its peers are told at once; the last rank once it has come."""
    first, second, last = pool.run(
        "waiting_jobs:interrupted", 3, fresh=GROUPS, place=place, kind=kind, exchange=exchange, times=(0.3, 1.7)
    )
    assert first.kind == "KeyboardInterrupt", first
    assert 0 <= first.seconds < 1.0, first
    for told in (second, last):
        assert told.kind == PEER_ERROR, told
        assert told.seconds < 1.2, told  # before the last rank has come
    if place == "agreement":
        assert_fine([first, second, last])
        for told in (second, last):
            assert re.search(r"rank 0 waited for rank 2 in call \d+ .* was interrupted", told.message), told.message
        return
    for told in (second, last):
        assert re.search(r"lost peer 0 in call \d+.*rank 0 failed in call .*KeyboardInterrupt", told.message), (
            told.message
        )
        assert told.next_error == float("inf"), "the group is closed"
    assert first.next_error == float("inf")


@pytest.mark.parametrize(("place", "exchange"), WAITS)
def test_other_threads_go_on_while_a_rank_waits(pool, place, exchange):
    stood_still = pool.run(
        "waiting_jobs:counted_meanwhile", 3, fresh=GROUPS, place=place, exchange=exchange, pause_s=0.8
    )
    assert max(stood_still) < 0.3, stood_still


def ranks_of_threads(what, world):
    """What each rank of a program of its own tells (thread_ranks.py)."""
    found = subprocess.run(
        [sys.executable, thread_ranks.__file__, what, str(world)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout)


def test_a_group_beyond_64_ranks_ends_by_the_deadline():
    """Its agreement is a collective: a rank that is absent is named by nobody, and the group is closed."""
    answers = ranks_of_threads("many", 65)
    for rank, (mean, differs, refused, absent, after) in enumerate(answers):
        assert mean == 32.0
        assert differs["kind"] == "ValueError"
        assert "averaged_by 2 step_valid None on rank 1." in differs["message"]
        assert refused["kind"] == "ValueError"
        assert "averaged_by is 'two'" in refused["message"]
        assert absent["kind"] == after["kind"] == PEER_ERROR, f"rank {rank}: {absent}, {after}"
        assert absent["seconds"] < thread_ranks.DEADLINE_S + MARGIN_S, f"rank {rank}: {absent}"
        assert "in call 4" in absent["message"]
        assert rank == 64 or "not all came within 1 s" in absent["message"], absent
        assert "is closed by an earlier failure" in after["message"]
        assert after["seconds"] < MARGIN_S


def test_a_group_without_a_store_agrees():
    """Threads as ranks: nothing bounds their waits, but what is wrong is told by the agreement itself."""
    for error, differs, refused, error_after, calls in ranks_of_threads("without", 3):
        assert max(error, error_after) < 1e-5
        assert differs["kind"] == refused["kind"] == "ValueError"
        assert "scale is 0.25 on ranks 0, 2, 0.5 on rank 1" in differs["message"]
        assert "scale is nan" in refused["message"]
        assert [number for number, kind in calls if kind == "forward"] == [1, 2, 3, 4, 5]

"""The flight record: the last calls of a rank, where the program made them, how far they came and how they ended."""

from __future__ import annotations

import os
import re

import pytest
from pool import Fresh

GROUP = Fresh(8)
PEER_ERROR = "DistBackendError"

# Kind and place of each call of flight_jobs:good_calls, in order; "" where the kind is that of a refusal.
CALLS = [
    ("forward", "flight_jobs:attend+2"),
    ("backward of call 1", "flight_jobs:attend+2"),
    ("forward", "flight_jobs:attend+2"),
    ("forward", "flight_jobs:attend_twice+2"),
    ("forward", "flight_jobs:Layer.forward+1"),
    ("forward", "flight_jobs:good_calls.<locals>.<lambda>+0"),
    ("other", "flight_jobs:good_calls+9"),
    ("other", "flight_jobs:good_calls+9"),
    ("other", "flight_jobs:good_calls+10"),
]

# Within this time every survivor is told; how soon most are, test_failing_ranks.py says.
SURELY_S = 12.0


def test_good_calls(pool):
    records = pool.run("flight_jobs:good_calls", 3, fresh=GROUP)
    for record in records:
        *agreed, refused, differs, unagreed = record.entries
        assert [entry["number"] for entry in record.entries] == [*range(1, 12), 0]
        assert [(entry["kind"], entry["place"]) for entry in agreed] == CALLS
        for entry in (*agreed, unagreed):
            assert entry["outcome"] == "done"
            assert record.began <= entry["begun"] <= entry["agreed"] <= entry["ended"] <= record.ended
        begun = [entry["begun"] for entry in record.entries]
        assert begun == sorted(begun)
        # What is used in step 2 is posted in step 1; gradients come home in the last step.
        assert [entry["step"] for entry in agreed[:2]] == [1, 2]
        for entry in (refused, differs):
            assert entry["agreed"] == 0
            assert entry["ended"] > 0
            assert entry["step"] == -1
        assert "scale is nan" in refused["outcome"]
        assert "scale is 0.25 on ranks 0, 2, 0.5 on rank 1" in differs["outcome"]
        assert (unagreed["kind"], unagreed["place"]) == ("forward", "flight_jobs:good_calls+15")
    assert [record.entries[9]["kind"] for record in records] == ["forward", "refused", "forward"]
    for calls in zip(*(record.entries[:9] for record in records), strict=True):
        assert len({entry["signature"] for entry in calls}) == 1
    signatures = [entry["signature"] for entry in records[0].entries]
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in signatures)
    assert len({signatures[index] for index in (0, 1, 2, 4, 5)}) == 1, "one set of arguments, from several places"
    assert len({signatures[index] for index in (0, 3, 6, 7, 8)}) == 5
    assert len({record.entries[10]["signature"] for record in records}) == 2


def test_compiled_code_has_no_place(pool):
    for entries in pool.run("flight_jobs:compiled", 2, fresh=GROUP):
        assert [(entry["kind"], entry["place"]) for entry in entries] == [("forward", ""), ("backward of call 1", "")]


def test_64_calls_are_kept(pool):
    assert pool.run("flight_jobs:many", 2, fresh=GROUP, count=70) == [list(range(7, 71))] * 2


@pytest.mark.parametrize("exchange", ["all_to_all", "p2p"])
def test_a_call_that_runs_says_where_it_is(pool, exchange):
    answers = pool.run("flight_jobs:reached", 3, fresh=GROUP, exchange=exchange)
    for rank, (outcome, transfer, step, ended) in enumerate(answers):
        assert (outcome, float(ended)) == ("", 0.0)
        assert re.fullmatch(r"step \d, (posting|waiting for) k and v of rank \d from rank \d to rank \d", transfer)
        assert transfer.startswith(f"step {step}, ")
        assert ("waiting for" in transfer) == (rank != 2), "the last rank computes, the others wait for it"


def assert_last_calls(message, number, place="waiting_jobs:Attention.forward+1"):
    assert re.search(rf"Last calls .*: {number} \(.*{re.escape(place)}\) on ranks 0, 1, 2", message), message


@pytest.mark.parametrize("exchange", ["all_to_all", "p2p", "all_gather"])
def test_a_rank_that_throws_is_in_every_record(pool, tmp_path, exchange):
    path = str(tmp_path / "record-%r.json")
    answers = pool.run("flight_jobs:failing", 3, fresh=GROUP, way="throw", exchange=exchange, path=path)
    for rank, failed in enumerate(answers):
        last = failed.entries[-1]
        assert (last["number"], last["kind"]) == (3, "forward")
        assert last["agreed"] > 0
        assert last["ended"] >= last["agreed"]
        if rank == 2 and exchange == "all_gather":
            assert (last["step"], last["transfer"]) == (-1, "")
        else:
            where = r"step \d, (posting|waiting for) k and v of rank \d from rank \d to rank \d"
            assert re.fullmatch(where, last["transfer"])
            assert last["transfer"].startswith(f"step {last['step']}, ")
        if rank == 2:
            assert failed.kind == "RuntimeError"
            assert last["outcome"] == "trapped"
        else:
            assert failed.kind == PEER_ERROR
            assert failed.seconds < SURELY_S
            assert last["outcome"] == failed.message
            assert re.search(
                r"lost peer 2 in call 3, step \d, .*rank 2 failed in call 3 \((before )?step \d.*trapped",
                failed.message,
            )
            assert_last_calls(failed.message, 3)
        # The file is the record, and JSON; the last call has ended in it.
        assert failed.file["rank"] == rank
        calls = failed.file["calls"]
        assert [call for call in calls if call["group"] == last["group"]] == failed.entries
    assert sorted(os.listdir(tmp_path)) == [f"record-{rank}.json" for rank in range(3)], "nothing else is left"


def test_an_absent_rank_is_in_the_files(pool, tmp_path):
    """Nothing was sent, and the group goes on; still a call has failed for a peer's sake."""
    path = str(tmp_path / "record-%r.json")
    answers = pool.run("flight_jobs:failing", 3, fresh=GROUP, way="absent", exchange="auto", path=path)
    for rank, failed in enumerate(answers):
        assert failed.kind == PEER_ERROR
        last = failed.entries[-1]
        assert (last["number"], last["kind"], last["step"], last["agreed"]) == (3, "forward", -1, 0)
        assert last["outcome"] == failed.message
        assert re.search(r"rank [01] waited for rank 2 in call 3 \(before step 0\)", failed.message)
        assert_last_calls(failed.message, 2)
        assert failed.file["rank"] == rank
        assert [call for call in failed.file["calls"] if call["group"] == last["group"]] == failed.entries


@pytest.mark.parametrize("path", ["/proc/nowhere/record-%r", "no/such/folder/%r", "/", "/dev/null/%r"])
def test_a_path_that_cannot_be_written_harms_nothing(pool, path):
    answers = pool.run("flight_jobs:failing", 3, fresh=GROUP, way="throw", exchange="auto", path=path)
    assert [failed.kind for failed in answers] == [PEER_ERROR, PEER_ERROR, "RuntimeError"]
    assert all("rank 2 failed in call 3" in failed.message for failed in answers[:2])
    assert all(failed.file is None and failed.seconds < SURELY_S for failed in answers)

"""Names stand once, in the core: the same strings work in Python, in the planner's answer and on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ringspan.call import AXES
from ringspan.names import DTYPES, EXCHANGES, LAYOUTS, MASK_CODES, PLAIN_MAPS, SCHEDULES, SPLIT_SCHEDULES

import ringspan as rs

COMMAND = Path(sys.executable).parent / "ringspan"
SIZES = (1, 4, 256, 32), (1, 2, 256, 32), (1, 2, 256, 32)
CALL = ["plan", "--world", "4", "--seq-len", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def planned(schedule: str) -> rs.Plan:
    return rs.plan(*SIZES, mask=rs.causal(), world_size=4, schedule=schedule)


def test_the_tables_hold_what_the_documents_name():
    assert SCHEDULES == ("auto", "ring", "gather", "ulysses", "pruned", "q_ring", "invariant")
    assert SPLIT_SCHEDULES == ("hybrid", "double_ring")
    assert {"auto", "all_to_all", "p2p", "all_gather"} <= set(EXCHANGES)
    assert LAYOUTS == ("BNSD", "BSND", "BSH", "SBH", "TND")
    assert DTYPES == ("float32", "bfloat16", "float16", "float64")
    assert PLAIN_MAPS == ("contiguous", "head_tail", "striped", "balanced")
    # Codes that compiled graphs hold.
    codes = ("full", "causal", "window", "chunked", "prefix", "documents", "document_ids", "bands", "and", "or")
    assert {name: code for code, name in enumerate(codes)} == MASK_CODES
    axes = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "BSH": (0, None, 1), "SBH": (1, None, 0), "TND": (None, 1, 0)}
    assert axes == AXES


@pytest.mark.parametrize("kind", SPLIT_SCHEDULES)
def test_a_split_schedule_takes_one_number_or_both(kind):
    made = {"hybrid": rs.hybrid(ulysses=2, ring=2), "double_ring": rs.double_ring(inner=2, outer=2)}[kind]
    assert made == f"{kind}:2x2"
    sent = [planned(name).ledger().rank(1).forward.sent_bytes for name in (made, f"{kind}:2")]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
    "name", ["hybrid", "hybrid:", "hybrid:0", "hybrid:2x", "hybrid:2x0", "ring:2", "double_ring:x", 3]
)
def test_what_is_no_schedule_is_refused_with_all_names(name):
    with pytest.raises(ValueError, match=r"schedule is .*give one of auto, ring, .*hybrid:N, double_ring:N"):
        planned(name)


def test_a_number_that_does_not_divide_the_ranks_is_refused_with_both():
    with pytest.raises(ValueError, match="hybrid:3 for a group of 4 ranks: 3 must divide 4"):
        planned("hybrid:3").rank(0)


@pytest.mark.parametrize(
    "name", ["ring", "gather", "ulysses", "hybrid:2", "pruned", "q_ring", "invariant", "double_ring:2x2"]
)
def test_the_command_line_takes_the_strings_of_python(name):
    result = run(*CALL, "--schedule", name, "--mask", "causal")
    assert result.returncode == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"{name} over 4 ranks")
    most = max(planned(name).ledger().rank(rank).forward.sent_bytes for rank in range(4))
    assert f"bytes that a rank sends at most: {most} forward" in result.stdout


def test_help_names_every_entry_of_every_table():
    text = " ".join(run("plan", "--help").stdout.split())
    for name in (*SCHEDULES[1:], *(f"{kind}:N" for kind in SPLIT_SCHEDULES), *LAYOUTS[:4], *PLAIN_MAPS, "zigzag"):
        assert name in text
    for name in list(MASK_CODES)[:-2]:
        assert name in text


@pytest.mark.parametrize(("short", "long"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_dtypes_have_both_names_on_the_command_line(short, long):
    assert run(*CALL, "--dtype", short).stdout == run(*CALL, "--dtype", long).stdout != ""


def test_zigzag_is_head_tail_on_the_command_line():
    sent = [run(*CALL, "--shard", name, "--json").stdout for name in ("zigzag", "head_tail")]
    assert sent[0] == sent[1] != ""


@pytest.mark.parametrize("kv_len", [256, 192])
def test_a_planners_answer_goes_into_a_call(kv_len):
    """Every candidate's arguments make the plan that the planner timed."""
    sizes, machine = (SIZES[0], (1, 2, kv_len, 32), (1, 2, kv_len, 32)), rs.Machine.nominal()
    mask = rs.window(64, align="top_left") if kv_len != 256 else rs.causal()
    choice = rs.choose_plan(*sizes, world_size=4, machine=machine, mask=mask)
    tried = [one for one in choice.candidates if not one.refused and one.shard]
    assert choice.best == tried[0]
    assert len({one.schedule for one in tried}) >= 5
    for one in tried:
        again = rs.plan(*sizes, world_size=4, mask=mask, **one.arguments()).simulate(machine)
        assert again.seconds == pytest.approx(one.seconds, rel=1e-6), one


def test_a_planners_answer_goes_into_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(size) for size in SIZES)
    choice = rs.choose_plan(*SIZES, world_size=1, machine=rs.Machine.nominal(), mask=rs.causal())
    out = rs.attention(q, k, v, mask=rs.causal(), group=rs.LOCAL, **choice.best.arguments())
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_refused_candidate_gives_no_arguments():
    small = rs.Machine.from_json(rs.Machine.nominal().to_json().replace('"memory_bytes": 0', '"memory_bytes": 1'))
    choice = rs.choose_plan(*SIZES, world_size=4, machine=small)
    assert choice.best is None
    with pytest.raises(ValueError, match="cannot run"):
        choice.candidates[0].arguments()

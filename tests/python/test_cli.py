"""The command line: exit status, messages, and what --json holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringspan as rs

COMMAND = Path(sys.executable).parent / "ringspan"
SIZES = ["--seq-len", "67", "--heads", "4", "--kv-heads", "2", "--head-dim", "24", "--v-head-dim", "16"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize(
    "shard", ["contiguous", "head_tail", "striped", "lengths:30,0,37", "balanced", "per_document:20,7,31"]
)
def test_verify_holds(dtype: str, shard: str) -> None:
    done = run("verify", "--world", "3", *SIZES, "--dtype", dtype, "--shard", shard, "--mask", "documents:20,7,31")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT" not in done.stdout
    assert done.stdout.rstrip().endswith("verified")


def test_verify_json_names_what_was_compared() -> None:
    done = run("verify", "--world", "2", *SIZES, "--mask", "causal", "--grad-route", "from_owner", "--json")
    result = json.loads(done.stdout)
    assert result["met"] is True
    assert done.returncode == 0
    assert [c["quantity"] for c in result["comparisons"]] == ["out", "lse", "dq", "dk", "dv"]
    assert result["sent_bytes"] == result["planned_bytes"]
    assert all(result["sent_bytes"])


# Schedules of four ranks: seven without, and the same with everything that can enter the softmax.
@pytest.mark.parametrize(
    "terms",
    [
        [],
        [
            "--bias",
            "rows",
            "--mask-tensor",
            "--alibi",
            "--softcap",
            "3",
            "--dropout",
            "0.3",
            "--sink",
            "--lse-gradient",
        ],
        ["--bias", "shared", "--dropout", "0.1", "--dtype", "bf16"],
    ],
)
def test_verify_of_all_schedules(terms: list[str]) -> None:
    question = ["verify", "--world", "4", *SIZES, "--schedule", "all", *terms]
    done = run(*question)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = ["ring", "gather", "ulysses", "pruned", "q_ring", "invariant", "hybrid:2", "double_ring:2"]
    assert [name for name in names if any(line.startswith(name + " ") for line in lines)] == names
    assert lines[-1] == "verified"
    assert done.stderr == ""
    result = json.loads(run(*question, "--json").stdout)
    assert result["met"] is True
    assert [one["schedule"] for one in result["schedules"]] == names
    quantities = ["out", "lse", "dq", "dk", "dv"]
    quantities += ["dbias"] * ("--bias" in terms) + ["dsink"] * ("--sink" in terms)
    for one in result["schedules"]:
        assert [c["quantity"] for c in one["comparisons"]] == quantities
        assert one["sent_bytes"] == one["planned_bytes"]


def test_verify_seed_draws_other_pairs() -> None:
    errors = set()
    for seed in ("1", "2"):
        done = run("verify", "--world", "2", *SIZES, "--dropout", "0.5", "--seed", seed, "--json")
        assert done.returncode == 0, done.stdout
        errors.add(json.loads(done.stdout)["comparisons"][0]["error"])
    assert len(errors) == 2


def test_verify_runs_the_instruction_set_that_is_asked_for() -> None:
    assert json.loads(run("verify", *SIZES, "--json", RINGSPAN_ISA="generic").stdout)["isa"] == "generic"


def test_plan_json_is_one_document_with_every_rank() -> None:
    plan = json.loads(run("plan", "--world", "4", *SIZES, "--json").stdout)
    assert [part["rank"] for part in plan["ranks"]] == [0, 1, 2, 3]
    assert all(len(part["forward"]) == 4 for part in plan["ranks"])


DIMS = [(1, 4, 67, 24), (1, 2, 67, 24), (1, 2, 67, 16)]


def python_plan(**options: object) -> rs.Plan:
    """The plan of SIZES on four ranks, by Python's defaults but for the mask."""
    return rs.plan(*DIMS, mask=rs.causal(), world_size=4, **options)


def test_command_line_and_python_split_alike_where_nothing_is_said() -> None:
    shown = json.loads(run("plan", "--world", "4", *SIZES, "--grad-route", "from_owner", "--json").stdout)
    assert shown == json.loads(python_plan().to_json())
    other = ["plan", "--world", "4", *SIZES, "--grad-route", "from_owner", "--shard", "head_tail", "--json"]
    assert json.loads(run(*other).stdout) != shown
    ledger = json.loads(run("ledger", "--world", "4", *SIZES, "--json").stdout)
    pairs = [rank.forward.kept_pairs for rank in python_plan().ledger()]
    assert [rank["forward"]["kept_pairs"] for rank in ledger["ranks"]] == pairs


def test_every_verb_splits_contiguous_where_nothing_is_said(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    rs.Machine.nominal().save(machine)
    for verb, *more in (["plan"], ["ledger"], ["verify"], ["simulate", "--machine", str(machine)]):
        question = [verb, "--world", "4", *SIZES, *more, "--json"]
        assert run(*question).stdout == run(*question, "--shard", "contiguous").stdout
        assert re.search(r"--shard TEXT(=| \[)contiguous\b", run(verb, "--help").stdout)
    from ringspan.bench.config import parse

    assert parse(["--output", "none.json", "--mask", "causal"], {}).shard == "contiguous"


def test_zigzag_is_another_word_for_head_tail() -> None:
    question = ["plan", "--world", "4", *SIZES, "--json"]
    named = run(*question, "--shard", "head_tail", "--kv-shard", "contiguous").stdout
    assert run(*question, "--shard", "zigzag", "--kv-shard", "contiguous").stdout == named
    assert run(*question, "--kv-shard", "zigzag").stdout == run(*question, "--kv-shard", "head_tail").stdout
    from ringspan.bench.config import parse

    assert parse(["--output", "none.json", "--shard", "zigzag"], {}).shard == "head_tail"


def test_plan_draws_who_holds_what() -> None:
    text = run(
        "plan", "--world", "2", "--seq-len", "10", "--heads", "1", "--head-dim", "8", "--shard", "head_tail"
    ).stdout
    assert "0011111000" in text


def test_ledger_tells_bytes_pairs_and_memory() -> None:
    sizes = ["--world", "4", "--seq-len", "1024", "--heads", "32", "--head-dim", "128", "--dtype", "bf16"]
    done = run("ledger", *sizes, "--mask", "full", "--shard", "contiguous", "--json")
    ledger = json.loads(done.stdout)
    assert ledger["exchange"] == "all_to_all"
    assert [rank["rank"] for rank in ledger["ranks"]] == [0, 1, 2, 3]
    forward = ledger["ranks"][1]["forward"]
    assert forward["sent_bytes"] == 3 * 2 * 256 * 4096 * 2
    assert [step["sent"] for step in forward["steps"]] == [{"k": 2097152, "v": 2097152}] * 3 + [{}]
    assert forward["kept_pairs"] == 256 * 1024
    text = run("ledger", *sizes, "--mask", "full", "--shard", "contiguous").stdout
    assert "6291456" in text
    assert len([line for line in text.splitlines() if " forward " in line or " backward " in line]) == 8


BUSIEST = ["--seq-len", "1300", "--heads", "2", "--head-dim", "8", "--mask", "causal", "--shard", "contiguous"]


@pytest.mark.parametrize("verb", ["plan", "ledger"])
def test_many_ranks_are_summed_up(verb: str) -> None:
    def rows(*arguments: str) -> list[str]:
        done = run(verb, *BUSIEST, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.splitlines()

    few = rows("--world", "65")
    shown = [int(line.split()[0]) for line in few if " forward " in line and line.split()[0].isdigit()]
    assert shown == [0, 64]  # the last has most pairs
    assert any(line.endswith("first") for line in few)
    assert any("last" in line and "most pairs" in line for line in few)
    [line] = [line for line in few if line.startswith("pairs")]
    per_rank = [20 * r * 20 + 20 * 21 // 2 for r in range(65)]
    heads = 2 if verb == "plan" else 1
    numbers = [int(number) for number in line.split()[-4:]]
    assert numbers == [heads * n for n in (sum(per_rank), min(per_rank), sum(per_rank) // 65, max(per_rank))]
    assert any("--all-ranks" in line for line in few)
    assert len(few) < 30
    assert sum(" forward " in line for line in rows("--world", "65", "--all-ranks")) == 65
    assert sum(" forward " in line for line in rows("--world", "64")) == 64


def test_bench_and_report_are_the_modules(tmp_path) -> None:
    for verb in ("bench", "report"):
        done = run(verb, "--help")
        assert done.returncode == 0
        assert f"ringspan.{verb}" in done.stdout
    done = run("report", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "none" in done.stderr


@pytest.mark.parametrize(
    ("exchange", "messages"), [("transfers", 2), ("p2p", 2), ("all_to_all", 2), ("auto", 2), ("all_gather", 1)]
)
def test_ledger_of_every_exchange(exchange: str, messages: int) -> None:
    schedule = "gather" if exchange == "all_gather" else "ring"
    done = run(
        "ledger", "--world", "3", *SIZES, "--schedule", schedule, "--exchange", exchange, "--rank", "1", "--json"
    )
    [rank] = json.loads(done.stdout)["ranks"]
    assert rank["forward"]["messages"] == messages


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--world", "2", *SIZES, "--dtype", "int8"], ["int8", "fp32"]),
        (["plan", "--world", "0", *SIZES], ["0"]),
        (["plan", "--world", "2", *SIZES, "--shard", "lengths:30,30"], ["60", "67"]),
        (["plan", "--world", "2", *SIZES, "--kv-len", "70", "--mask", "causal"], ["67", "70"]),
        (["plan", "--world", "2", *SIZES, "--rank", "2"], ["2"]),
        (["ledger", "--world", "2", *SIZES, "--rank", "2"], ["2"]),
        (["ledger", "--world", "2", *SIZES, "--exchange", "broadcast"], ["broadcast", "all_to_all"]),
        (["ledger", "--world", "2", *SIZES, "--exchange", "all_gather"], ['schedule="gather"', '"ring"']),
        (["ledger", "--world", "2", *SIZES, "--shard", "per_document:60,8"], ["68", "67"]),
        (["verify", "--seq-len", "8", "--heads", "4", "--kv-heads", "3"], ["4", "3"]),
        (["verify", *SIZES, "--mask", "diagonal"], ["diagonal"]),
        (["verify", *SIZES, "--dropout", "1"], ["--dropout", "1"]),
        (["verify", *SIZES, "--softcap", "-2"], ["--softcap", "-2"]),
        (["verify", *SIZES, "--bias", "columns"], ["columns", "rows", "shared"]),
        (["verify", *SIZES, "--world", "4", "--schedule", "hybrid:3"], ["3", "4"]),
        (["nonsense"], []),
    ],
)
def test_bad_arguments_exit_2_with_the_values(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


def test_an_unknown_instruction_set_names_those_on_offer() -> None:
    done = run("verify", *SIZES, RINGSPAN_ISA="mmx")
    assert done.returncode == 2
    assert "mmx" in done.stderr
    assert "generic" in done.stderr


def test_info_tells_the_version_and_the_instruction_sets() -> None:
    info = json.loads(run("info", "--json").stdout)
    assert info["isa"] in info["isas"]
    assert info["isas"][0] == "generic"
    assert info["version"].count(".") == 2

"""The multi-rank benchmark: paths against the oracle, bytes by hand, how runs end. The jobs of the pool are here too.

Runs through torchrun cost seconds of imports each, so there are few, and each shows several things.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
WATCHDOG_S = 150
SIZES = {
    "full": {"seq_len": 13, "mask": "full", "kv_heads": 4},
    "causal": {"seq_len": 13, "mask": "causal", "shard": "head_tail", "kv_heads": 2},
    "causal, contiguous": {"seq_len": 13, "mask": "causal", "kv_heads": 2},
    "one row": {"seq_len": 1, "mask": "causal", "kv_heads": 4},
}


def config_of(group: dist.ProcessGroup, **changed):
    from ringspan.bench.config import parse

    base = ["--output", "none.json", "--num-heads", "4", "--head-dim", "8", "--backend", "gloo", "--dtype", "float32"]
    place = {"rank": dist.get_rank(group), "world": dist.get_world_size(group)}
    return dataclasses.replace(parse([*base, "--backward", "--repeats", "5", "--warmup", "1"], {}), **place, **changed)


def record_of(config):
    from ringspan.bench.result import begin_result
    from ringspan.bench.run import planned_metrics

    return begin_result(config, [], "id") | {"metrics": planned_metrics(config)}


def outcome(group: dist.ProcessGroup, config) -> tuple[dict, str | None, str]:
    """The record after `measure`, the kind of failure, its message."""
    from ringspan.bench.judge import RunFailed
    from ringspan.bench.ranks import Ranks
    from ringspan.bench.run import measure

    record = record_of(config)
    try:
        measure(config, Ranks(group), record, lambda *_: None)
    except RunFailed as failure:
        return record, failure.kind, str(failure)
    return record, None, ""


def paths_against_oracle(group: dist.ProcessGroup, sizes: dict) -> dict[str, float]:
    """The largest error of every path's own rows: out, dq and, where they are complete, dk and dv."""
    from ringspan.bench.inputs import Inputs
    from ringspan.bench.paths import build_paths
    from ringspan.bench.ranks import Ranks

    config, ranks = config_of(group, **sizes), Ranks(group)
    inputs = Inputs(config, ranks.rank, ranks.device)
    q, k, v, dout = (x.double().numpy() for x in inputs.whole)
    rule = ("causal",) if config.mask == "causal" else ("full",)
    expected = oracle.attend(q, k, v, oracle.keep_of(rule, config.seq_len, config.seq_len), dout)
    rows = oracle.holdings((config.shard,), config.seq_len, ranks.world)[ranks.rank]
    errors = {}
    for name, path in build_paths(config, ranks, inputs).items():
        results = path.run()
        wanted = [expected.out, expected.dq, expected.dk, expected.dv][: 2 if path.partial else 4]
        pairs = zip(results, wanted, strict=False)
        differences = [np.abs(x.detach().double().numpy() - oracle.take_rows(w, rows)) for x, w in pairs]
        errors[name] = max(float(d.max(initial=0.0)) for d in differences)
    return errors


def complete_run(group: dist.ProcessGroup, sizes: dict) -> dict:
    record, kind, message = outcome(group, config_of(group, **sizes))
    assert kind is None, message
    return record


def wrong_path(group: dist.ProcessGroup, value: float) -> tuple[dict, str | None, str]:
    """One path is off in one number on the last rank."""
    from ringspan.bench import paths

    right = paths.Gathered.run

    def wrong(self):
        out, *rest = right(self)
        if self.ranks.rank == self.ranks.world - 1:
            out[0, 0, 0, 0] += value
        return out, *rest

    paths.Gathered.run = wrong
    try:
        return outcome(group, config_of(group, **SIZES["full"]))
    finally:
        paths.Gathered.run = right


def wrong_schedule(group: dist.ProcessGroup) -> tuple[dict, str | None, str]:
    """One schedule is off in one number."""
    from ringspan.bench import paths

    right = paths.Scheduled.run

    def wrong(self):
        out, *rest = right(self)
        if self.schedule == "pruned":
            out[0, 0, 0, 0] += 0.01
        return out, *rest

    paths.Scheduled.run = wrong
    try:
        return outcome(group, config_of(group, **SIZES["full"], schedules=("ulysses", "pruned")))
    finally:
        paths.Scheduled.run = right


def wrong_count(group: dist.ProcessGroup) -> tuple[dict, str | None, str]:
    """One path posts more than the ledger says."""
    from ringspan.bench import paths

    right = paths.Gathered.run

    def chatty(self):
        self.ranks.gather_rows(torch.zeros(3))
        return right(self)

    paths.Gathered.run = chatty
    try:
        return outcome(group, config_of(group, **SIZES["full"]))
    finally:
        paths.Gathered.run = right


def other_options(group: dist.ProcessGroup) -> tuple[dict, str | None, str]:
    rank = dist.get_rank(group)
    return outcome(group, config_of(group, **(SIZES["full"] | {"seq_len": 13 + rank})))


def overlap_is_restored(group: dist.ProcessGroup) -> bool:
    """After a timed call that raises, exchanges overlap again."""
    from ringspan.bench import measure

    calls = []
    real = torch.ops.ringspan._set_wait_at_post

    class Broken:
        def run(self):
            raise RuntimeError("broken")

    torch.ops.ringspan._set_wait_at_post = calls.append
    try:
        with pytest.raises(RuntimeError, match="broken"):
            measure._waiting(Broken())()
    finally:
        torch.ops.ringspan._set_wait_at_post = real
    return calls == [True, False]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_path_is_attention(pool, world, sizes):
    for errors in pool.run("test_cp_benchmark:paths_against_oracle", world, sizes=sizes):
        assert len(errors) == 6
        assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_schedule_is_attention_and_measured(pool, world):
    from ringspan.bench.config import schedules_of
    from ringspan.bench.result import faults_of

    schedules = schedules_of(world)
    assert len(schedules) == {1: 5, 2: 5, 4: 7}[world]
    sizes = SIZES["causal"] | {"schedules": schedules}
    for errors in pool.run("test_cp_benchmark:paths_against_oracle", world, sizes=sizes):
        assert list(errors)[6:] == [f"{schedule}_all_to_all" for schedule in schedules]
        assert max(errors.values()) <= 1e-5, errors
    record = pool.run("test_cp_benchmark:complete_run", world, sizes=sizes)[0]
    assert faults_of(record) == []
    assert record["workload"]["schedules"] == ["ring", *schedules]
    for schedule in schedules:
        path = record["metrics"]["paths"][f"{schedule}_all_to_all"]
        assert path["schedule"] == schedule
        assert path["bytes"]["counted"] == path["bytes"]["ledger"]
        assert len(path["time_ms"]["samples"]) == 5


def test_a_schedule_that_computes_wrong_is_a_failure(pool):
    for _, kind, message in pool.run("test_cp_benchmark:wrong_schedule", 2):
        assert kind == "wrong_result"
        assert "pruned_all_to_all: out is off by" in message
        assert "ulysses" not in message


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_measures_and_decides_alike_on_every_rank(pool, world):
    from ringspan.bench.result import faults_of

    records = pool.run("test_cp_benchmark:complete_run", world, sizes=SIZES["causal"])
    assert all(record["metrics"] == records[0]["metrics"] for record in records)
    record = records[0]
    assert faults_of(record) == []
    assert record["evidence_level"] == "measured_cpu"
    assert (record["decision"]["value"] == "no_exchange") == (world == 1)
    paths = record["metrics"]["paths"]
    # Padded shards of 13 rows, 2 KV heads, K and V of 8 numbers; gradients in fp32 as well. All to each other rank.
    slot = {1: 13, 2: 7, 3: 5}[world]
    one_way = (world - 1) * slot * 2 * 2 * 8 * 4
    assert record["metrics"]["kv_exchange_bytes_per_rank"] == one_way
    assert paths["gathered"]["bytes"]["counted"] == [2 * one_way] * world
    assert record["metrics"]["local_kv_bytes_per_rank"] == slot * 2 * 2 * 8 * 4
    assert record["metrics"]["replicated_kv_bytes_per_rank"] == 13 * 2 * 2 * 8 * 4
    for path in paths.values():
        assert path["bytes"]["ledger"] == path["bytes"]["counted"]
        assert path["messages"]["ledger"] == path["messages"]["counted"]
        assert len(path["time_ms"]["samples"]) == 5
    assert (paths["ring_p2p"]["without_overlap"] is None) == (world == 1)


@pytest.mark.parametrize("value", [0.01, float("nan")])
def test_a_wrong_result_is_a_failure_and_no_time(pool, value):
    for record, kind, message in pool.run("test_cp_benchmark:wrong_path", 2, value=value):
        assert kind == "wrong_result"
        assert "gathered: out is off by" in message
        assert record["evidence_level"] == "correctness_only"
        assert all(path["time_ms"] is None for path in record["metrics"]["paths"].values())


def test_bytes_that_differ_from_the_ledger_are_a_failure(pool):
    for _, kind, message in pool.run("test_cp_benchmark:wrong_count", 2):
        assert kind == "wrong_bytes"
        # 7 rows of 4 heads, K and V of 8 numbers, there and back; the extra message has 3 numbers.
        sent = 2 * 7 * 4 * 2 * 8 * 4
        assert f"gathered: bytes per rank are {[sent + 12] * 2}, but the ledger says {[sent] * 2}" in message


def test_ranks_with_other_options_are_refused(pool):
    for _, kind, message in pool.run("test_cp_benchmark:other_options", 2):
        assert kind == "bad_configuration"
        assert "--seq-len is 13 on rank 0, but 14 on rank 1" in message


def test_overlap_is_restored_after_a_failure(pool):
    assert pool.run("test_cp_benchmark:overlap_is_restored", 1) == [True]


def launch(world: int, program: list[str], output: Path, *more: str) -> tuple[subprocess.CompletedProcess, dict]:
    """Runs a program with small sizes under torchrun; what became of it, and the file."""
    options = ["--output", str(output), "--seq-len", "67", "--num-heads", "4", "--head-dim", "16", "--warmup", "1"]
    command = [*TORCHRUN, str(world), *program, *options, "--repeats", "5", *more]
    # Otherwise torchrun tells that it sets this very value.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WATCHDOG_S, cwd=output.parent, env=environment
    )
    return done, json.loads(output.read_text()) if output.exists() else {}


def test_a_torchrun_of_two_ranks(tmp_path):
    """Unequal shards, causal, grouped heads, backward; and silence on a standard error that is a pipe."""
    output = tmp_path / "result.json"
    split = ["--mask", "causal", "--shard", "head_tail"]
    more = [*split, "--kv-heads", "2", "--backward", "--dtype", "float32", "--run-label", "two"]
    done, result = launch(2, ["-m", "ringspan.bench"], output, *more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "gather_all_gather" in done.stdout
    assert "measured_cpu" in done.stdout
    # Four chunks of 16, 17, 17 and 17 positions; rank 0 holds the first and the last one.
    assert result["workload"]["shard_map"] == "head_tail"
    assert result["workload"]["local_rows"] == [33, 34]
    assert result["hardware"]["ranks"] == 2
    assert result["run"]["label"] == "two"
    assert result["run"]["command"].startswith("torchrun --standalone --nproc_per_node 2 -m ringspan.bench --output")
    assert result["failure"] is None
    assert result["metrics"]["reference"] == "float64"
    again, unchanged = launch(1, [str(ROOT / "tools" / "run_parallel_mechanism_benchmark.py")], output)
    assert again.returncode != 0
    assert "holds the run 'two', this run is 'default'" in again.stderr
    assert unchanged == result


@pytest.mark.slow
def test_a_torchrun_of_three_ranks(tmp_path):
    done, result = launch(3, ["-m", "ringspan.bench"], tmp_path / "result.json", "--repeats", "0")
    assert done.returncode == 0, done.stderr
    assert result["workload"]["local_rows"] == [22, 22, 23]
    assert result["evidence_level"] == "correctness_only"
    assert result["decision"]["value"] == "not_measured"
    # Two hops of K and V, 4 heads of 16 numbers of 2 bytes: the own shard, then that of the rank before.
    row = 2 * 4 * 16 * 2
    sent = result["metrics"]["paths"]["ring_p2p"]["bytes"]["counted"]
    assert sent == [(22 + 23) * row, (22 + 22) * row, (23 + 22) * row]


# What the ranks of a program do to themselves in the midst of a check, and how the file has to tell it. Of three ranks,
# two must agree on who is lost.
LOSSES = {
    "killed": (3, "1", "os.kill(os.getpid(), signal.SIGKILL)", "lost_peer", "no word from rank 1"),
    "first killed": (2, "0", "os.kill(os.getpid(), signal.SIGKILL)", "lost_peer", "no word from rank 0"),
    "out of memory": (2, "1", "raise MemoryError('no room')", "out_of_memory", "MemoryError: no room"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "rank", "deed", "kind", "message"), LOSSES.values(), ids=LOSSES)
def test_a_lost_rank_leaves_a_file_and_no_process(tmp_path, world, rank, deed, kind, message):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\nfrom ringspan.bench import main, paths\n\n\ndef fail(self):\n"
        f"    {deed}\n\n\nif os.environ['RANK'] == '{rank}':\n    paths.Gathered.run = fail\nsys.exit(main())\n"
    )
    done, result = launch(world, [str(program)], tmp_path / "result.json", "--timeout", "30")
    assert done.returncode != 0
    assert result["failure"]["kind"] == kind, done.stderr
    assert message in result["failure"]["message"]
    assert result["failure"]["rank"] == int(rank)
    assert result["decision"]["value"] == "failed"
    assert "ringspan.bench failed" in done.stderr

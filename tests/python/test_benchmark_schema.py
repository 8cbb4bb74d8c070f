"""The benchmark's options, files and rules: what needs no second rank."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from ringspan.bench import main
from ringspan.bench.config import parse
from ringspan.bench.decision import VALUE_OF, decide
from ringspan.bench.failures import describe
from ringspan.bench.inputs import reference_of
from ringspan.bench.judge import RunFailed
from ringspan.bench.measure import exposed_of, overlap_share_of, spread_of
from ringspan.bench.result import faults_of, schema, write_result
from ringspan.errors import PeerError

SMALL = ["--seq-len", "10", "--num-heads", "4", "--head-dim", "8"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def dry_run(output: Path, *more: str) -> dict:
    assert main(["--dry-run", "--output", str(output), *SMALL, *more]) == 0
    return json.loads(output.read_text())


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    return capsys.readouterr().err


def timed_path(exchange: str | None = "p2p", low: float = 0.01, high: float = 0.05, median: float = 2.0) -> dict:
    share = (low + high) / 2
    exposed = {"ms": share * median, "p10_ms": low * median, "p90_ms": high * median}
    exposed |= {"share": share, "p10_share": low, "p90_share": high}
    counts = {"ledger": [8, 8], "counted": [8, 8]}
    return {
        "exchange": exchange,
        "base": "ring_local",
        "max_abs_error": 1e-7,
        "errors": {"replicated": {"out": {"max_abs": 1e-7, "limit": 1e-5}}},
        "messages": counts,
        "bytes": counts,
        "time_ms": {"median": median, "p10": median, "p90": median, "samples": [median]},
        "tokens_per_s": 5e3,
        "exposed": exposed,
        "without_overlap": {"time_ms": spread_of([median]), "exposed": exposed},
        "overlap_share": 0.0,
    }


def test_a_dry_run_plans_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.ops.ringspan, "attention", None)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    result = dry_run(tmp_path / "a" / "b" / "x.json", "--world", "3", "--kv-heads", "2", "--dtype", "float16")
    assert capsys.readouterr().err == ""
    assert faults_of(result) == []
    assert {"workload", "hardware", "metrics", "evidence_level", "failure", "decision"} <= result.keys()
    assert result["evidence_level"] == "dry_run"
    assert result["decision"]["value"] == "not_measured"
    assert result["hardware"]["ranks"] == 3
    assert sorted(result["workload"]["local_rows"]) == [3, 3, 4]
    # 2 KV heads, K and V of 8 numbers of 2 bytes; shards of 4 rows are padded and sent to two others.
    row = 2 * 2 * 8 * 2
    assert result["metrics"]["local_kv_bytes_per_rank"] == 4 * row
    assert result["metrics"]["replicated_kv_bytes_per_rank"] == 10 * row
    assert result["metrics"]["kv_exchange_bytes_per_rank"] == 2 * 4 * row
    assert [entry["check"] for entry in result["preflight"]] == ["cores", "shards", "memory", "reference", "output"]


def test_labels_protect_files(tmp_path, capsys):
    output = tmp_path / "x.json"
    first = dry_run(output, "--run-label", "one")
    arguments = ["--dry-run", "--output", str(output), *SMALL, "--run-label"]
    assert "holds the run 'one', this run is 'two'" in refused(capsys, *arguments, "two")
    assert "holds the run 'one', this run is 'two'" in refused(capsys, *arguments, "two", "--force")
    assert "same label 'one'; give --force" in refused(capsys, *arguments, "one")
    assert json.loads(output.read_text()) == first
    assert dry_run(output, "--run-label", "one", "--force")["run"]["id"] != first["run"]["id"]
    for foreign in ("{}", "no json", '{"run": 3}', "[]"):
        output.write_text(foreign)
        assert "no result of this benchmark" in refused(capsys, *arguments, "one", "--force")
        assert output.read_text() == foreign
    assert "is a folder" in refused(capsys, "--dry-run", "--output", str(tmp_path))
    assert "is not a folder" in refused(capsys, "--dry-run", "--output", str(output / "below.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seq-len", "0"], ["--seq-len is 0", ">= 1"]),
        (["--num-heads", "8", "--kv-heads", "3"], ["--num-heads is 8", "--kv-heads 3"]),
        (["--kv-heads", "0"], ["--kv-heads is 0", ">= 1"]),
        (["--repeats", "-1"], ["--repeats is -1", ">= 0"]),
        (["--dtype", "int8"], ["int8", "bfloat16"]),
        (["--mode", "tp"], ["tp", "cp_attention"]),
        (["--run-label", " "], ["--run-label is ' '", "1 to 200"]),
        (["--workload-id", "a\nb"], ["--workload-id is 'a\\nb'"]),
        (["--timeout", "nan"], ["--timeout is nan"]),
        (["--world", "2"], ["--world is 2", "--nproc_per_node 2"]),
        (["--schedules", "spiral"], ["spiral", "pruned"]),
        (["--schedules", "hybrid:2x2", "--world", "2", "--dry-run"], ["hybrid:2x2", "2 ranks", "ulysses"]),
        (["--seq-len", "100000000", "--dry-run"], ["--seq-len 100000000", "MB", "available"]),
    ],
)
def test_bad_arguments_end_with_2_and_both_values(arguments, words, tmp_path, capsys):
    message = refused(capsys, "--output", str(tmp_path / "x.json"), *arguments)
    assert all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


def test_torchruns_variables_place_a_rank():
    given = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    config = parse(["--output", "x"], given)
    assert (config.world, config.rank, config.local_rank, config.local_world) == (4, 3, 1, 2)
    assert config.backend == ("nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= 2 else "gloo")
    with pytest.raises(SystemExit):
        parse(["--output", "x", "--world", "2"], given)


ILLEGAL = {
    "evidence_level": lambda r: r.update(evidence_level="guessed"),
    "decision": lambda r: r["decision"].update(value="good"),
    "decision.rule": lambda r: r["decision"].update(rule="one_rank"),
    "failure without its decision": lambda r: r.update(failure={"kind": "error", "message": "m", "rank": 0}),
    "failure.kind": lambda r: r.update(failure={"kind": "bad luck", "message": "m", "rank": 0}),
    "failed without failure": lambda r: r.update(decision={"value": "failed", "rule": "run_failed", "reason": "r"}),
    "measured without a time": lambda r: r.update(evidence_level="measured_cpu"),
    "time of a dry run": lambda r: r["metrics"].update(exposed_exchange_ms_proxy=1.0),
    "negative exposure": lambda r: r["metrics"].update(exposed_exchange_ms_proxy=-1.0),
    "missing hardware": lambda r: r.pop("hardware"),
    "extra key": lambda r: r.update(more=1),
    "unknown path": lambda r: r["metrics"]["paths"].update(magic=timed_path()),
    "path without bytes": lambda r: r["metrics"]["paths"].update(
        ring_p2p={k: v for k, v in timed_path().items() if k != "bytes"}
    ),
    "version": lambda r: r.update(schema_version=2),
}


@pytest.fixture(scope="module")
def legal(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("legal") / "x.json"
    assert main(["--dry-run", "--output", str(path), *SMALL]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("spoil", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_files_are_refused_and_never_written(spoil, legal, tmp_path):
    assert faults_of(legal) == []
    spoiled = copy.deepcopy(legal)
    spoil(spoiled)
    assert faults_of(spoiled) != []
    with pytest.raises(ValueError, match="does not follow its schema"):
        write_result(tmp_path / "x.json", spoiled, force=False)
    assert list(tmp_path.iterdir()) == []


def test_legal_ends_of_a_run(legal, tmp_path):
    failed = copy.deepcopy(legal) | {"failure": {"kind": "lost_peer", "message": "gone", "rank": 1}}
    failed["decision"] = decide({}, 2, 10, failed["failure"])
    measured = copy.deepcopy(legal) | {"evidence_level": "measured_cpu"}
    measured["metrics"] |= {"exposed_exchange_ms_proxy": 0.0, "exposed_exchange_ms_raw": -0.1}
    measured["metrics"]["paths"] = {"ring_p2p": timed_path()}
    measured["decision"] = decide(measured["metrics"]["paths"], 2, 10, None)
    for result in (failed, measured):
        assert faults_of(result) == []
    write_result(tmp_path / "x.json", measured, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o666 & ~mask


def test_the_schema_lists_every_rule():
    pairs = [entry["properties"] for entry in schema()["properties"]["decision"]["oneOf"]]
    listed = {
        rule: pair["value"]["const"] for pair in pairs for rule in pair["rule"].get("enum", [pair["rule"].get("const")])
    }
    assert listed == VALUE_OF


def test_decisions():
    hidden, exposed = timed_path(low=0.01, high=0.10), timed_path(low=0.11, high=0.3, median=3.0)
    spread = timed_path(low=-0.05, high=0.3, median=1.0)
    gathered = timed_path(exchange=None, low=0.4, high=0.5, median=0.5)
    base = timed_path(exchange=None) | {"exposed": None}
    rule = {
        "hidden": decide({"ring_local": base, "ring_p2p": hidden, "ring_all_to_all": exposed}, 2, 10, None),
        "exposed": decide({"ring_p2p": exposed}, 2, 10, None),
        "fastest": decide({"ring_p2p": exposed, "ring_all_to_all": spread}, 2, 10, None),
        "no ring": decide({"gathered": gathered}, 2, 10, None),
        "ring first": decide({"gathered": gathered, "ring_p2p": hidden}, 2, 10, None),
        "few": decide({"ring_p2p": hidden}, 2, 4, None),
        "alone": decide({"ring_p2p": hidden}, 1, 10, None),
        "untimed": decide({"ring_p2p": hidden | {"time_ms": None}}, 2, 10, None),
        "wrong": decide({}, 2, 10, {"kind": "wrong_result", "message": "m", "rank": None}),
    }
    assert {name: entry["value"] for name, entry in rule.items()} == {
        "hidden": "exchange_hidden",
        "exposed": "exchange_exposed",
        "fastest": "inconclusive",
        "no ring": "exchange_exposed",
        "ring first": "exchange_hidden",
        "few": "inconclusive",
        "alone": "no_exchange",
        "untimed": "not_measured",
        "wrong": "wrong_result",
    }
    assert "ring_all_to_all" in rule["fastest"]["reason"]


def test_spreads_and_shares_by_numpy():
    drawn = np.random.default_rng(5).uniform(1, 2, (2, 11))
    spread = spread_of(drawn[0].tolist())
    p10, median, p90 = np.percentile(drawn[0], [10, 50, 90])
    assert (spread["p10"], spread["median"], spread["p90"]) == pytest.approx((p10, median, p90))
    exposed = exposed_of(drawn[0].tolist(), drawn[1].tolist())
    difference = drawn[0] - drawn[1]
    assert exposed["ms"] == pytest.approx(median - np.median(drawn[1]))
    assert exposed["p10_ms"] == pytest.approx(np.percentile(difference, 10))
    assert exposed["p90_share"] == pytest.approx(np.percentile(difference / drawn[0], 90))


@pytest.mark.parametrize(
    ("ms", "waiting_ms", "waiting_p10", "share"),
    [
        (1.0, 4.0, 3.0, 0.75),
        (-0.5, 4.0, 3.0, 1.0),
        (6.0, 4.0, 3.0, -0.5),
        (1.0, 4.0, -0.1, None),
        (1.0, -1.0, 0.1, None),
    ],
)
def test_overlap_share(ms, waiting_ms, waiting_p10, share):
    assert overlap_share_of({"ms": ms}, {"ms": waiting_ms, "p10_ms": waiting_p10}) == share


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_attention(causal):
    q, k, v, dout = oracle.draw(3, 9, 4, 2, 8)
    expected = oracle.attend(q, k, v, oracle.keep_of(("causal",) if causal else ("full",), 9, 9), dout)
    found = reference_of([torch.from_numpy(x) for x in (q, k, v, dout)], causal)
    for got, want in zip(found, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        assert np.abs(got.numpy() - want).max() < 1e-13


def test_failures_have_kinds():
    cases = [
        (RunFailed("wrong_bytes", "m"), "wrong_bytes", None),
        (PeerError("gone"), "lost_peer", 2),
        (MemoryError(), "out_of_memory", 2),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory", 2),
        (ValueError("v"), "bad_configuration", 2),
        (KeyboardInterrupt(), "terminated", 2),
        (ZeroDivisionError("z"), "error", 2),
    ]
    for error, kind, rank in cases:
        failure = describe(error, 2)
        assert (failure["kind"], failure["rank"]) == (kind, rank)
        assert failure["message"]

"""The bench: counts, targets and judgement by themselves, then tiny rows as a user starts them."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.mark.slow
def test_tiny_rows_are_right_and_complete(tmp_path: Path) -> None:
    measured = [
        ("kernel", "kernel/*32/*/causal/*/T1", ["ratio", "share_of_peak", "gflops", "peak_gflops", "errors"]),
        ("decode", "decode/bf16/H1/T2", ["ratio", "share_of_peak"]),
        ("ring", "ring/bf16/forward_backward/causal/*", ["ratio", "slowdown", "slowdown_p2p", "errors"]),
        ("ring", "schedules/bf16/*/documents/*", ["best_over_ring", "best", "errors"]),
        ("pairs", "pairs/*/forward/*/D64/T1", ["threads"]),
        ("cost", "cost/small_call/*", ["call_us"]),
        ("cost", "cost/plan_share/*", ["plan_share"]),
        ("sim", "sim/time/ring", ["seconds"]),
        ("sim", "sim/prediction/W2/fp32/*", ["error"]),
        ("sim", "sim/prediction/all", ["median", "worst"]),
    ]
    globs = [glob for _, glob, _ in measured]
    command = [sys.executable, str(BENCH / "run.py"), "--quick", "--out", str(tmp_path), "--only", *globs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    for family, glob, fields in measured:
        content = json.loads((tmp_path / f"{family}.json").read_text())
        assert {"cpu", "cores", "instruction_set", "torch"} <= content["machine"].keys()
        rows = [row for row in content["rows"] if fnmatch.fnmatch(row["name"], glob)]
        assert rows
        for row in rows:
            assert row["wrong"] is None
            assert all(row[field] is not None for field in fields)
            assert row["date"]
            assert row["commit"]
            assert row["command"].endswith(f"--only {row['name']}")
            assert all(value > 0 for value in row["milliseconds"].values())
            if row["name"].startswith("schedules/"):
                # The best is one of the others, held against the ring of the same turns.
                times = dict(row["milliseconds"])
                ring = times.pop("ring")
                assert row["best"] == min(times, key=times.get)
                assert row["best_over_ring"] == pytest.approx(times[row["best"]] / ring)
                assert {"gather", "ulysses", "pruned"} <= times.keys()
                assert ("q_ring" in times) == ("forward_backward" in row["name"])
                assert row["errors"].keys() == row["milliseconds"].keys()


def test_every_schedule_of_two_ranks_is_timed() -> None:
    from ring_worker import _SCHEDULES
    from ringspan.bench.config import schedules_of

    assert _SCHEDULES[True] == ("ring", *schedules_of(2))


def test_every_row_has_a_name_of_its_own_and_is_listed(capsys: pytest.CaptureFixture) -> None:
    from run import main

    assert main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert len(names) == len(set(names))
    for seq_len in (1024, 4096):
        for head_dim in (64, 128):
            for mask in ("full", "causal"):
                for dtype in ("fp32", "bf16"):
                    assert f"ring/{dtype}/forward_backward/{mask}/S{seq_len}/D{head_dim}" in names
                    assert f"schedules/{dtype}/forward_backward/{mask}/S4096/D{head_dim}" in names
                for dtype in ("fp32", "bf16", "fp16"):
                    for threads in (1, 2):
                        assert f"kernel/{dtype}/backward/{mask}/S{seq_len}/D{head_dim}/T{threads}" in names


def test_an_unknown_row_ends_with_2(capsys: pytest.CaptureFixture) -> None:
    from run import main

    assert main(["--only", "kernel/int8/*", "ring/int8/*"]) == 2
    assert "kernel/int8/* or ring/int8/*" in capsys.readouterr().err


def test_operations_are_counted_for_kept_pairs_only() -> None:
    from shapes import Case

    full, causal = (Case("fp32", mask, seq_len=3, head_dim=5, heads=2) for mask in ("full", "causal"))
    # Two products of 2 operations for each of 9 or 6 pairs, 5 numbers, 2 heads; five such products backward.
    assert full.flops(forward=True, backward=False) == 2 * 2 * 9 * 5 * 2
    assert causal.flops(forward=False, backward=True) == 5 * 2 * 6 * 5 * 2


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_reference_is_attention(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import reference
    from shapes import Case

    monkeypatch.setattr(reference, "_ROWS", 7)  # several blocks, the last one shorter
    case = Case("fp32", mask, seq_len=23, head_dim=8, heads=2)
    found = reference.reference_of(case)
    *qkv, dout = (x.double() for x in case.inputs())
    for x in qkv:
        x.requires_grad_()
    out = F.scaled_dot_product_attention(*qkv, is_causal=mask == "causal")
    expected = [out, *torch.autograd.grad(out, qkv, dout)]
    for want, got in zip(expected, (found.out, *found.grads), strict=True):
        torch.testing.assert_close(got, want[0, found.head])


def test_wrong_results_are_noticed() -> None:
    from reference import distance_to, judge

    right = torch.linspace(-1, 1, 100)
    off = right.clone()
    off[3] += 2e-5
    assert judge("fp32", False, distance_to((right,), (right,)), None) is None
    assert "1e-05" in judge("fp32", False, distance_to((right,), (off,)), None)
    assert judge("fp32", True, distance_to((right,), (off,)), None) is None
    off[5] = float("nan")
    assert judge("fp32", True, distance_to((right,), (off,)), None) is not None
    rounded, coarse = right.bfloat16(), (right * 16).round() / 16
    peer = distance_to((right,), (rounded,))
    assert judge("bf16", False, peer, peer) is None
    assert judge("bf16", False, distance_to((right,), (coarse,)), peer) is not None


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        ({"value": 1.2, "at_least": 1.15}, True),
        ({"value": 1.1, "at_least": 1.15}, False),
        ({"value": 1.04, "at_most": 1.03}, False),
        ({"value": 1.02, "at_most": 1.03}, True),
        ({"value": None, "at_least": 8.0}, None),
        ({"value": 3.0}, None),
    ],
)
def test_goals(goal: dict, met: bool | None) -> None:
    from output import is_met

    assert is_met(goal) is met


def test_sides_take_turns_and_the_shortest_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import turns
    from ringspan.bench import clock

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    calls = []
    spans = {"a": iter([4.0, 3.0, 4.0]), "b": iter([1.0, 2.0, 3.0]), "slow": iter([50.0])}

    def side(name: str) -> str:
        calls.append(name)
        now[0] += next(spans[name])
        return name

    sides = {name: (lambda name=name: side(name)) for name in spans}
    timer = clock.Clock()
    results, first = turns.first_calls(timer, sides)
    assert results == {"a": "a", "b": "b", "slow": "slow"}
    seconds = turns.shortest_in_turns(timer, sides, first, budget_s=0.0)
    assert calls == ["a", "b", "slow", "a", "b", "a", "b"]
    assert seconds == {"a": 3.0, "b": 1.0, "slow": 50.0}


def test_a_time_is_that_of_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringspan.bench import clock

    class Two:
        """This rank beside one that takes 5 s for everything."""

        def barrier(self) -> None:
            now[0] += 100.0

        def synchronize(self) -> None:
            now[0] += 0.5

        def slowest(self, seconds: list[float]) -> list[float]:
            return [max(one, 5.0) for one in seconds]

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    wait = lambda seconds: lambda: now.__setitem__(0, now[0] + seconds)  # noqa: E731
    timer = clock.Clock(Two())
    assert timer.seconds(wait(2.0)) == 5.0
    assert timer.call(wait(7.0)) == (None, 7.5)
    # Ends at 1.5, 10 and 12.5 s of this rank, the first of them at 5 s of the other.
    assert timer.parts([wait(1.0), wait(8.0), wait(2.0)]) == [5.0, 5.0, 2.5]

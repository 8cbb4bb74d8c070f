"""`ringspan.fit`: what is solved from measurements. The measuring itself runs in tests/multiproc/test_fit_ranks.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from ringspan.fit import check, main
from ringspan.fit.solve import Node, fit_two, solve

LATENCY, BANDWIDTH, STEP, COPY = 2e-4, 3e9, 5e-5, 7e9
SPEEDS = {("fp32", 64): (4e10, 3e10, 1e-7, 2e-7), ("bf16", 128): (9e10, 8e10, 3e-7, 0.0)}


def measured_by_hand(link_class: str = "node") -> list[dict]:
    """What a machine of exactly these figures would yield."""
    results: list[dict] = []
    for (dtype, head_dim), (forward, backward, forward_row, backward_row) in SPEEDS.items():
        for flops, rows in ((1e10, 8192), (5e9, 8192), (1e9, 9000), (2e8, 16384)):
            results.append(
                {
                    "kind": "kernel",
                    "dtype": dtype,
                    "head_dim": head_dim,
                    "rows": rows,
                    "forward": {"seconds": 2 * STEP + flops / forward + rows * forward_row, "flops": flops},
                    "backward": {"seconds": 2 * STEP + flops / backward + rows * backward_row, "flops": flops},
                }
            )
    results.append({"kind": "copy", "bytes": 1000, "seconds": 1000 / COPY})
    for size in (4096, 1 << 20, 8 << 20):
        seconds = LATENCY + size / BANDWIDTH
        results.append({"kind": "link", "class": link_class, "bytes": size, "seconds": seconds})
    results.append({"kind": "overlap", "compute": 0.03, "message": 0.01, "together": 0.034})
    forward, backward = 1e-3 + 2 * STEP + LATENCY, 2e-3 + 2 * STEP + 3 * LATENCY
    results.append({"kind": "calls", "alone": (2 * STEP, 2 * STEP), "ring": (forward, backward), "world": 2})
    return results


def solved(results: list[dict]) -> dict:
    """With the fields that nobody measures."""
    node = Node(ranks=4, processors=2, memory_bytes=5, waits_for_all=True)
    return solve(results, name="x", source="y", node=node)


def test_the_figures_come_back() -> None:
    found = solved(measured_by_hand())
    assert found["node"] == pytest.approx({"latency_seconds": LATENCY, "bytes_per_second": BANDWIDTH})
    assert found["network"] == found["node"]
    assert found["overlap"] == pytest.approx(0.6)
    assert found["copy_bytes_per_second"] == pytest.approx(COPY)
    assert found["step_seconds"] == pytest.approx(STEP)
    assert found["forward_call_seconds"] == pytest.approx(1e-3)
    assert found["backward_call_seconds"] == pytest.approx(2e-3)
    for kernel in found["kernels"]:
        speeds = SPEEDS[kernel["dtype"], kernel["head_dim"]]
        names = ("forward_flops_per_second", "backward_flops_per_second", "forward_row_seconds", "backward_row_seconds")
        assert [kernel[name] for name in names] == pytest.approx(speeds, rel=1e-6, abs=1e-15)


def test_one_link_class_stands_for_the_other() -> None:
    found = solved(measured_by_hand("network"))
    assert found["node"] == found["network"]
    assert found["node"]["bytes_per_second"] == pytest.approx(BANDWIDTH)


def test_a_rank_alone_has_links_and_calls() -> None:
    results = [r for r in measured_by_hand() if r["kind"] != "link"]
    del results[-1]["ring"], results[-1]["world"]
    found = solved(results)
    assert found["node"]["bytes_per_second"] > 0
    assert found["forward_call_seconds"] == pytest.approx(STEP)


def test_fit_two_never_goes_below_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = [(x, y) for x, y in torch.rand(5, 2, generator=generator).add(0.1).tolist()]
        seconds = torch.rand(5, generator=generator).add(0.1).tolist()
        a, b = fit_two(rows, seconds)
        assert a >= 0
        assert b >= 0
        error = _relative_error(rows, seconds, a, b)
        # No neighbour that is allowed is nearer.
        for da, db in itertools.product((-1e-3, 0, 1e-3), repeat=2):
            if a + da >= 0 and b + db >= 0:
                assert error <= _relative_error(rows, seconds, a + da, b + db) + 1e-12


def _relative_error(rows: list[tuple[float, float]], seconds: list[float], a: float, b: float) -> float:
    return sum(((a * x + b * y) / t - 1) ** 2 for (x, y), t in zip(rows, seconds, strict=True))


def test_errors_are_summed_up() -> None:
    assert check.summary_of([0.3, 0.1, 0.2]) == pytest.approx((0.2, 0.3))
    assert check.Comparison(2, check.WORKLOADS[0], 2.0, 1.5).error == pytest.approx(0.25)


def test_workloads_split_over_two_and_four_ranks() -> None:
    for workload, world in itertools.product(check.WORKLOADS, (2, 4)):
        smap = workload.make_map(world)
        assert sum(smap.local_rows(rank) for rank in range(world)) == workload.seq_len


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0"),
        (["--repeats", "-1"], "--repeats is -1"),
        (["--dtypes", "int8"], "int8"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err

"""What comes out of the demo: the comparison, a table, a JSON file and a picture."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from config import RunConfig
from launch import RunResult
from rich.console import Console
from rich.table import Table
from ringspan.bench.host import describe_host

LOSS_LIMIT = 1e-4
# The system counts the transport's headers too: about a hundred bytes a message.
WIRE_LIMIT = 0.01
WIRE_SLACK_BYTES_PER_STEP = 65536


def relative_differences(one: list[float], many: list[float]) -> list[float]:
    """|many - one| / |one| of each step; infinite where one of them is no number or a step is missing."""
    differences = [float("inf")] * max(len(one), len(many))
    for step, (a, b) in enumerate(zip(one, many, strict=False)):
        difference = abs(b - a) / abs(a) if a else float("inf")
        differences[step] = difference if difference == difference else float("inf")
    return differences


def tokens_per_second(config: RunConfig, result: RunResult) -> float:
    """Over the steps after the first, which also sets things up; over the first where there is no other."""
    seconds = result.seconds[1:] or result.seconds
    return config.seq_len * len(seconds) / sum(seconds)


def build_report(single: RunConfig, single_result: RunResult, spread: RunConfig, result: RunResult) -> dict[str, Any]:
    """Everything that report.json holds; lists `..._per_rank` have one entry for each rank of the spread run."""
    ranks = [result.ranks[rank] for rank in range(spread.world)]
    differences = relative_differences(single_result.losses, result.losses)
    return {
        "max_relative_loss_difference": max(differences),
        "loss_difference_limit": LOSS_LIMIT,
        "tokens_per_second": {
            "one_process": tokens_per_second(single, single_result),
            "context_parallel": tokens_per_second(spread, result),
        },
        "bytes_sent_per_rank": [rank["sent_bytes"] for rank in ranks],
        "planned_bytes_per_rank": [rank["planned_bytes"] for rank in ranks],
        "peak_memory_per_rank_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        "peak_memory_one_process_bytes": single_result.ranks[0]["peak_memory_bytes"],
        "steps": [
            {"step": step, "loss_one_process": a, "loss_context_parallel": b, "relative_difference": difference}
            for step, (a, b, difference) in enumerate(
                zip(single_result.losses, result.losses, differences, strict=False)
            )
        ],
        "seconds_per_step": {"one_process": single_result.seconds, "context_parallel": result.seconds},
        "world_size": spread.world,
        "threads_per_process": {"one_process": single.threads, "context_parallel": spread.threads},
        "seq_len": spread.seq_len,
        "mask": spread.mask,
        "seed": spread.seed,
        "model": vars(spread.model) | {"parameters": ranks[0]["parameters"]},
        "text": {"source": "Python standard library", "bytes": ranks[0]["corpus_bytes"]},
        "versions": ranks[0]["versions"],
        "instruction_set": ranks[0]["instruction_set"],
        "machine": describe_host(),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def find_faults(report: dict[str, Any]) -> list[str]:
    """What keeps the demo from being a success, in words; empty if all is well."""
    faults = []
    worst = report["max_relative_loss_difference"]
    if not worst <= LOSS_LIMIT:
        at = max(report["steps"], key=lambda step: step["relative_difference"], default={"step": "?"})["step"]
        faults.append(f"the losses differ by {worst:.2e} relative (step {at}); at most {LOSS_LIMIT:.0e} is accepted")
    pairs = zip(report["bytes_sent_per_rank"], report["planned_bytes_per_rank"], strict=True)
    for rank, (sent, planned) in enumerate(pairs):
        slack = planned * WIRE_LIMIT + WIRE_SLACK_BYTES_PER_STEP * len(report["steps"])
        if sent is not None and not planned <= sent <= planned + slack:
            faults.append(f"rank {rank} sent {sent} bytes for attention, but the plan says {planned}")
    return faults


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Two tables: losses step by step, and cost per run or rank."""
    losses = Table(title="Loss, same seed and text")
    for heading in ("step", "one process", f"{report['world_size']} processes", "relative difference"):
        losses.add_column(heading, justify="right")
    for step in report["steps"]:
        one, many, difference = (
            step[name] for name in ("loss_one_process", "loss_context_parallel", "relative_difference")
        )
        losses.add_row(str(step["step"]), f"{one:.6f}", f"{many:.6f}", f"{difference:.1e}")
    console.print(losses)
    cost = Table(title="Cost")
    for heading in ("", "tokens/s", "attention bytes sent", "planned", "peak memory"):
        cost.add_column(heading, justify="right")
    speed = report["tokens_per_second"]
    peak = report["peak_memory_one_process_bytes"]
    cost.add_row("one process", f"{speed['one_process']:.0f}", "-", "-", megabytes(peak))
    for rank in range(report["world_size"]):
        cost.add_row(
            f"rank {rank} of {report['world_size']}",
            f"{speed['context_parallel']:.0f}" if rank == 0 else "",
            megabytes(report["bytes_sent_per_rank"][rank]),
            megabytes(report["planned_bytes_per_rank"][rank]),
            megabytes(report["peak_memory_per_rank_bytes"][rank]),
        )
    console.print(cost)
    console.print(f"largest relative difference of the losses: {report['max_relative_loss_difference']:.1e}")


def megabytes(count: int | None) -> str:
    """For people; a count that the system does not give is a question mark."""
    return "?" if count is None else f"{count / 1e6:.2f} MB"


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes report.json and loss.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    draw_losses(folder / "loss.png", report)


def draw_losses(path: Path, report: dict[str, Any]) -> None:
    """Both loss curves above, their relative difference below."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = [step["step"] for step in report["steps"]]
    figure, (curves, gap) = plt.subplots(2, 1, sharex=True, figsize=(7, 5.5), height_ratios=(3, 2))
    one = [step["loss_one_process"] for step in report["steps"]]
    many = [step["loss_context_parallel"] for step in report["steps"]]
    curves.plot(steps, one, color="#1f77b4", linewidth=4, alpha=0.45, label="one process")
    label = f"{report['world_size']} processes, context parallel"
    curves.plot(steps, many, color="#d62728", linewidth=1.2, marker="o", markersize=3, label=label)
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title(f"Byte-level transformer, sequence of {report['seq_len']}, {report['mask']} mask")
    curves.legend()
    # A difference of exactly 0 has no logarithm; it is drawn at the bottom.
    gap.semilogy(
        steps, [max(step["relative_difference"], 1e-9) for step in report["steps"]], color="#444444", marker="."
    )
    gap.axhline(report["loss_difference_limit"], color="#d62728", linestyle="--", linewidth=1, label="limit")
    gap.set_ylim(5e-10, 1e-3)
    gap.set_ylabel("relative difference")
    gap.set_xlabel("step")
    gap.legend(loc="center right")
    gap.xaxis.get_major_locator().set_params(integer=True)
    for axes in (curves, gap):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""Trains a small byte-level transformer in one process, then again over several with its sequence split, and compares.

    python examples/demo/train.py [--steps 12] [--seq-len 8192] [--world 2] [--mask documents] [--out out/demo]

Exit status 0: every loss of both runs agrees to 1e-4 and the bytes sent are those of the plan. 1: they do not, or a
process failed. 2: bad arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from config import ModelConfig, RunConfig
from launch import RunFailed, RunResult, launch
from report import build_report, find_faults, print_report, write_report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads and checks the command line."""
    parser = argparse.ArgumentParser(description="Trains in one process and over several, and compares the losses.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--world", type=int, default=2, help="processes of the second run (default 2)")
    parser.add_argument("--mask", choices=("causal", "documents"), default="causal")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--quick", action="store_true", help="a tiny model and sequence, for a first look")
    parsed = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("seq_len", 1), ("world", 1)):
        if getattr(parsed, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(parsed, name)}; give at least {least}")
    return parsed


def make_configs(parsed: argparse.Namespace) -> tuple[RunConfig, RunConfig]:
    """The run of one process, which uses all cores, and the run over `--world` processes, which share them."""
    cores = os.cpu_count() or 1
    base = RunConfig(
        steps=parsed.steps, seq_len=parsed.seq_len, mask=parsed.mask, seed=parsed.seed, threads=cores, world=1
    )
    if parsed.quick:
        model = ModelConfig(layers=2, dim=64, heads=4, kv_heads=2, head_dim=16, hidden_dim=128)
        base = dataclasses.replace(base, steps=min(parsed.steps, 4), seq_len=min(parsed.seq_len, 512), model=model)
    return base, dataclasses.replace(base, world=parsed.world, threads=max(1, cores // parsed.world))


@contextmanager
def progress_of(console: Console, title: str, steps: int) -> Iterator[Callable[[RunResult], None]]:
    """Yields what shows each step: a bar on a terminal, a line of text elsewhere."""
    if not console.is_terminal:

        def print_step(result: RunResult) -> None:
            console.print(f"{title}: step {len(result.losses)}/{steps} loss {result.losses[-1]:.4f}", highlight=False)

        yield print_step
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        task = progress.add_task(title, total=steps, loss="starting")

        def move_bar(result: RunResult) -> None:
            progress.update(task, completed=len(result.losses), loss=f"loss {result.losses[-1]:.4f}")

        yield move_bar


def main(arguments: list[str]) -> int:
    """Runs both, reports; returns the exit status."""
    parsed = parse_arguments(arguments)
    console, errors = Console(), Console(stderr=True)
    single, spread = make_configs(parsed)
    results = []
    try:
        for title, config in (("one process", single), (f"{spread.world} processes", spread)):
            with progress_of(console, title, config.steps) as on_step:
                results.append(launch(config, on_step))
    except RunFailed as failure:
        errors.print(f"The demo failed: {failure}", style="red", markup=False, soft_wrap=True)
        return 1
    report = build_report(single, results[0], spread, results[1])
    write_report(parsed.out, report)
    print_report(console, report)
    console.print(f"written: {parsed.out / 'report.json'}, {parsed.out / 'loss.png'}", highlight=False)
    faults = find_faults(report)
    for fault in faults:
        errors.print(f"The demo failed: {fault}", style="red", markup=False, soft_wrap=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

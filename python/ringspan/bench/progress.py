"""What a person sees: a bar while it runs, where standard error is a terminal, and a table at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PIPE_WIDTH = 150


@contextlib.contextmanager
def progress_bar(shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Gives `show(phase, done, total)`, which draws on standard error, on a terminal and if `shown`."""
    if not shown or not sys.stderr.isatty():
        yield lambda phase, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn only when told to: a thread that draws would take part in what is timed.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(phase: str, done: int, total: int) -> None:
            progress.update(task, description=phase, completed=done, total=total, refresh=True)

        yield show


def print_summary(result: dict[str, Any], output: Path) -> None:
    """The result as a table on standard output."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    for entry in result["preflight"]:
        style = "yellow" if entry["status"] == "warning" else None
        text = f"{entry['status']}: {entry['check']}: {entry['detail']}"
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
    if result["metrics"]["paths"]:
        console.print(_table(result["metrics"]["paths"]))
    decision = result["decision"]
    for text in (f"{decision['value']}: {decision['reason']}", f"{result['evidence_level']}: {output}"):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table(paths: dict[str, Any]) -> Table:
    table = Table()
    columns = ("ms median [p10, p90]", "tokens/s", "error", "bytes: ledger", "counted", "exposed ms", "overlap share")
    table.add_column("path", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for name, path in paths.items():
        time, exposed = path["time_ms"], path["exposed"]
        table.add_row(
            name,
            f"{time['median']:.3f} [{time['p10']:.3f}, {time['p90']:.3f}]" if time else "-",
            f"{path['tokens_per_s']:.0f}" if time else "-",
            "-" if path["max_abs_error"] is None else f"{path['max_abs_error']:.2g}",
            *(_of_ranks(path["bytes"][kind]) for kind in ("ledger", "counted")),
            f"{exposed['ms']:.3f}" if exposed else "-",
            "-" if path["overlap_share"] is None else f"{path['overlap_share']:.0%}",
        )
    return table


def _of_ranks(counts: list[int]) -> str:
    """One number where all ranks are alike, else the smallest and the largest."""
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"

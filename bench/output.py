"""Rows as they come, a table at the end, and one JSON file for each family."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from ringspan.bench.files import write_json
from ringspan.bench.host import describe_host, stamp

_ROOT = Path(__file__).resolve().parent.parent


def is_met(goal: dict[str, Any]) -> bool | None:
    """Whether the goal's value is within its limit; None where there is no limit or no value."""
    value, least, most = goal["value"], goal.get("at_least"), goal.get("at_most")
    if value is None or (least is None and most is None):
        return None
    return (least is None or value >= least) and (most is None or value <= most)


class Output:
    """Collects the rows of one run of the bench."""

    def __init__(self, folder: Path, quick: bool, count: int) -> None:
        self.folder, self.quick, self.count = folder, quick, count
        self.families: dict[str, list[dict[str, Any]]] = {}
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = 140

    def add(self, family: str, row: dict[str, Any]) -> None:
        """Takes a row as a family yields it, completes it and shows it. What was measured is on disk at once."""
        for goal in row["goals"]:
            goal["met"] = None if self.quick else is_met(goal)
            row[goal["name"]] = goal["value"]
        arguments = ["bench/run.py", *(["--quick"] if self.quick else []), "--only", row["name"]]
        row["command"] = shlex.join([".venv/bin/python", *arguments])
        made = stamp()
        row["date"], row["commit"] = made["date"], made["commit"] or "unknown"
        self.families.setdefault(family, []).append(row)
        done = sum(map(len, self.families.values()))
        # Names hold no markup, but a path in a message may.
        self.console.print(f"{done}/{self.count} {_line(row)}", highlight=False, markup=False, soft_wrap=True)
        self._write(family)

    def finish(self) -> None:
        """Prints the table of all rows and how many targets are met."""
        table = Table(title="Bench" + (" (tiny sizes: times mean nothing)" if self.quick else ""))
        for heading in ("row", "ours ms", "others ms", "value", "target", "met"):
            table.add_column(heading, no_wrap=True)
        for row in self._all_rows():
            _add_row(table, row)
        self.console.print(table)
        goals = [goal["met"] for row in self._all_rows() for goal in row["goals"] if goal["met"] is not None]
        wrong = [row["name"] for row in self._all_rows() if row["wrong"]]
        self.console.print(
            f"{sum(goals)} of {len(goals)} targets met, {len(wrong)} wrong results; {self.folder}/*.json"
        )

    def exit_status(self, require_targets: bool) -> int:
        """1 where a result is wrong, or a target is missed and that counts."""
        missed = any(goal["met"] is False for row in self._all_rows() for goal in row["goals"])
        return int(any(row["wrong"] for row in self._all_rows()) or (require_targets and missed))

    def _all_rows(self) -> list[dict[str, Any]]:
        return [row for rows in self.families.values() for row in rows]

    def _write(self, family: str) -> None:
        content = {"machine": describe_host(), "quick": self.quick, "rows": self.families[family]}
        # A result that is not finite is told as it is.
        write_json(self.folder / f"{family}.json", content, allow_nan=True)


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{side} {value:.3g} ms" for side, value in row["milliseconds"].items())
    goals = ", ".join(f"{goal['what']} {_number(goal['value'])}" for goal in row["goals"])
    return f"{row['name']}: {times}{'; ' if times else ''}{goals}{'; WRONG: ' + row['wrong'] if row['wrong'] else ''}"


def _add_row(table: Table, row: dict[str, Any]) -> None:
    times = dict(row["milliseconds"])
    first = next(iter(times), None)
    ours = f"{times.pop(first):.3g}" if first else ""
    others = ", ".join(f"{side} {value:.3g}" for side, value in times.items())
    goals = row["goals"]
    values = "\n".join(f"{_number(goal['value'])} {goal['what']}" for goal in goals)
    targets = "\n".join(_target(goal) for goal in goals)
    met = "\n".join({True: "yes", False: "[red]no[/red]", None: ""}[goal["met"]] for goal in goals)
    table.add_row(row["name"], ours, others, values, targets, "[red]WRONG[/red]" if row["wrong"] else met)


def _target(goal: dict[str, Any]) -> str:
    if goal.get("at_least") is not None:
        return f">= {_number(goal['at_least'])}"
    return f"<= {_number(goal['at_most'])}" if goal.get("at_most") is not None else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"

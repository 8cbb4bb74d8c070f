"""`python -m ringspan.mechanism`: writes the exercise, and checks a solution.

Exit status: 0 all right, 1 something in the solution is wrong, 2 a file or an argument is bad.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ImportError:
    print('The exercise prints with rich, which is missing; install "ringspan[demo]".', file=sys.stderr)
    raise SystemExit(2) from None

from ringspan.mechanism.check import Fault, Unreadable, Verdict, check, describe_call, load

EXERCISE = Path(__file__).parent / "exercise.py"


def fault_panel(verdict: Verdict, fault: Fault) -> Panel:
    """The smallest example that fails, and the hint."""
    rows = Table.grid(padding=(0, 2))
    if fault.case is not None:
        call = f"{verdict.name}({describe_call(fault.case.arguments)})"
        rows.add_row(Text("case"), Text(fault.case.shows))
        rows.add_row(Text("call"), Text(call))
        rows.add_row(Text("expected", style="green"), Text(fault.expected))
        rows.add_row(Text("yours", style="red"), Text(fault.got))
    rows.add_row(Text("hint", style="yellow"), Text(fault.hint))
    return Panel(rows, title=verdict.name, title_align="left", border_style="red")


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """A table of all functions, then a panel for each that is not right."""
    table = Table(title="Your exercise")
    table.add_column("function")
    table.add_column("")
    table.add_column("cases that hold", justify="right")
    for verdict in verdicts:
        result = "[green]holds[/]" if verdict.fault is None else "[red]does not hold[/]"
        table.add_row(verdict.name, result, f"{verdict.held} of {verdict.cases}")
    console.print(table)
    for verdict in verdicts:
        if verdict.fault is not None:
            console.print(fault_panel(verdict, verdict.fault))
    if all(verdict.fault is None for verdict in verdicts):
        console.print("All four hold: with them, attention in parts is attention.", style="green")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ringspan.mechanism",
        description="An exercise in context parallel attention: four functions to write, and their check.",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--exercise", type=Path, metavar="FILE", help="write the exercise to a new file")
    action.add_argument("--check", type=Path, metavar="FILE", help="check the functions in a file")
    options = parser.parse_args(arguments)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        if options.exercise is not None:
            with options.exercise.open("xb") as target, EXERCISE.open("rb") as source:
                shutil.copyfileobj(source, target)
            name = escape(str(options.exercise))
            Console(soft_wrap=True, highlight=False).print(
                f"Wrote {name}. Fill it in, then: python -m ringspan.mechanism --check {name}"
            )
            return 0
        verdicts = check(load(options.check))
    except FileExistsError:
        errors.print(f"{escape(str(options.exercise))} exists and is left as it is; give the name of a new file")
        return 2
    except (OSError, Unreadable) as error:
        errors.print(escape(str(error)))
        return 2
    print_verdicts(Console(highlight=False), verdicts)
    return 1 if any(verdict.fault is not None for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())

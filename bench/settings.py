"""What the command line asks for, as every family of rows sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """`quick`: tiny sizes that show that all works. `budget_s`: time of one row, apart from the least rounds."""

    quick: bool = False
    threads: tuple[int, ...] = (1, 2)
    budget_s: float = 1.5


def run_each(
    rows: Mapping[str, tuple], selected: Sequence[str], run_row: Callable[..., dict[str, Any]], settings: Settings
) -> Iterator[dict[str, Any]]:
    """The result of each selected row: what `run_row` gives for the row's values and the settings."""
    for name in selected:
        yield {"name": name, **run_row(*rows[name], settings)}

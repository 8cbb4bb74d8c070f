"""What the command line asks for, as every family of rows sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`quick`: tiny sizes that show that all works. `budget_s`: time of one row, apart from the least rounds."""

    quick: bool = False
    threads: tuple[int, ...] = (1, 2)
    budget_s: float = 1.5

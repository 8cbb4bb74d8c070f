"""Checks that docs/faults.md names tests that exist: every `file::test` of its table, in Python and in C++.

A Python test is a function of that name in that file (`Class::test` for a method), a C++ test a TEST, TEST_F or TEST_P
that is named `Suite.Name`. Exit status 1 names each missing one with its line.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"

NAMED = re.compile(r"`([\w./-]+\.(?:py|cc))::([\w.:]+)`")
CXX_TEST = re.compile(r"^\s*TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.M)


def python_tests(text: str) -> set[str]:
    """The functions of a file, and the methods of its classes as `Class::name`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, kinds):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, kinds)}
    return found


def cxx_tests(text: str) -> set[str]:
    """The tests of a file as `Suite.Name`."""
    return {f"{suite}.{name}" for suite, name in CXX_TEST.findall(text)}


def faults_of(page: str, root: Path) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of a page whose files are named from `root`."""
    for number, line in enumerate(page.split("\n"), 1):
        named = NAMED.findall(line)
        is_row = line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line) and "| test |" not in line
        if is_row and not named:
            yield number, "a row without a test; write it as `tests/folder/test_file.py::test_name`"
        for file, test in named:
            path = root / file
            if not path.is_file():
                yield number, f"{file}::{test}: there is no such file"
                continue
            text = path.read_text(encoding="utf-8")
            if test not in (python_tests(text) if path.suffix == ".py" else cxx_tests(text)):
                yield number, f"{file}::{test}: the file has no such test"


def main() -> int:
    """Prints every fault; returns the exit status."""
    page = PAGE.read_text(encoding="utf-8")
    faults = [f"{PAGE.relative_to(ROOT).as_posix()}:{line}: {fault}" for line, fault in faults_of(page, ROOT)]
    print("\n".join(faults) or f"faults: {len(NAMED.findall(page))} tests named, all there")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""Finds code that stands twice: six or more lines in a row that are alike, in what the repository ships.

Lines are compared without indentation. What is no code does not count: blank lines, comments, docstrings, imports and
includes, and lines of brackets alone. examples/ is left out, because users copy an example as a whole, as are tests.
Exit status 1 names each pair.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from check_style import ROOT, repository_files

LEAST = 6
FOLDERS = ("ringspan/", "binding/", "cli/", "python/ringspan/", "bench/", "tools/")
SUFFIXES = (".h", ".cc", ".py")

# Two files, in order of their names, and why what they share stays: at most one reason for a pair of files.
ALLOWED = {
    ("python/ringspan/attention.py", "python/ringspan/plan.py"): "two public signatures of the same call",
}

COMMENT_OR_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
# What brings names in.
USING = re.compile(r"^\s*using [\w:]+;", re.M)


class Line(NamedTuple):
    """One line of code: its number in the file, and its text."""

    number: int
    text: str


class Pair(NamedTuple):
    """`count` lines from `first` on in one file are those from `second` on in another, or further down."""

    file: str
    first: int
    other: str
    second: int
    count: int


def blank(match: re.Match[str]) -> str:
    """The matched text's line breaks."""
    return re.sub(r"[^\n]", " ", match[0])


def lines_of_cxx(text: str) -> list[str]:
    """The lines without comments, directives and using-declarations; there are as many as before."""
    text = COMMENT_OR_TEXT.sub(lambda match: blank(match) if match[0].startswith("/") else match[0], text)
    return USING.sub(blank, DIRECTIVE.sub(blank, text)).split("\n")


def lines_of_python(text: str) -> list[str]:
    """The lines without comments of their own, docstrings and imports; there are as many as before."""
    lines = [line if not line.lstrip().startswith("#") else "" for line in text.split("\n")]
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return lines


def code_of(name: str, text: str) -> list[Line]:
    """The lines of code of a file."""
    lines = lines_of_python(text) if name.endswith(".py") else lines_of_cxx(text)
    return [Line(number, line.strip()) for number, line in enumerate(lines, 1) if re.search(r"\w", line)]


def pairs_in(texts: Mapping[str, str]) -> Iterator[Pair]:
    """Every pair in files of these names and contents, each at its full length."""
    code = {name: code_of(name, text) for name, text in sorted(texts.items())}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in code.items():
        for begin in range(len(lines) - LEAST + 1):
            places[tuple(line.text for line in lines[begin : begin + LEAST])].append((name, begin))
    for found in places.values():
        for index, (name, begin) in enumerate(found):
            for other, start in found[index + 1 :]:
                mine, theirs = code[name], code[other]
                if begin and start and mine[begin - 1].text == theirs[start - 1].text:
                    continue  # the middle of a longer pair
                if name == other and start < begin + LEAST:
                    continue  # a pattern that repeats itself
                count = common_length(mine[begin:], theirs[start:])
                yield Pair(name, mine[begin].number, other, theirs[start].number, count)


def common_length(one: list[Line], other: list[Line]) -> int:
    """How many lines are alike at the beginning of both."""
    count = 0
    while count < min(len(one), len(other)) and one[count].text == other[count].text:
        count += 1
    return count


def faults_of(texts: Mapping[str, str], allowed: Mapping[tuple[str, str], str]) -> list[str]:
    """What to mend, in words: pairs that are not allowed, and allowances that nothing needs."""
    pairs = sorted(pairs_in(texts))
    faults = [
        f"{pair.file}:{pair.first}: {pair.count} lines of code are those of {pair.other}:{pair.second}"
        for pair in pairs
        if (pair.file, pair.other) not in allowed
    ]
    unneeded = sorted(allowed.keys() - {(pair.file, pair.other) for pair in pairs})
    return faults + [f"{one}: shares nothing with {other}; take it off the list" for one, other in unneeded]


def product_texts() -> dict[str, str]:
    """The files that are checked."""
    names = {path.relative_to(ROOT).as_posix(): path for path in repository_files() if path.suffix in SUFFIXES}
    return {name: path.read_text(encoding="utf-8") for name, path in names.items() if name.startswith(FOLDERS)}


def main() -> int:
    """Prints every fault; returns the exit status."""
    texts = product_texts()
    faults = faults_of(texts, ALLOWED)
    print("\n".join(faults) or f"duplicates: {len(texts)} files, none")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""How many parameters the functions of a source take, C++ and Python.

C++ is read without a compiler: declarations and definitions at namespace and class scope, constructors and pointers to
functions included. Lambdas, and whatever else stands inside a body, are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple


class Signature(NamedTuple):
    """A function, the line that it begins on, and the number of its parameters."""

    name: str
    line: int
    count: int


OPENING, CLOSING = "([{", ")]}"

# What may carry parentheses before a function's name.
DECORATION = re.compile(r"__attribute__\s*\(\(.*?\)\)|alignas\s*\([^()]*\)|explicit\s*\([^()]*\)|\[\[.*?\]\]")
SCOPE = re.compile(r"(?:inline )?(?:namespace|extern|struct|class|union)\b")
# Macros that are written like calls.
MACRO = re.compile(r"[A-Z][A-Z0-9_]{2,}$")
NO_NAMES = {"static_assert", "decltype", "noexcept", "requires", "if", "for", "while", "switch", "return", "sizeof"}


def split_top(text: str) -> Iterator[tuple[int, str]]:
    """Yields (place, character) of the characters outside all brackets, and of each bracket that opens outside.

    `<` opens a bracket where no space stands before it: `a < b` is a comparison.
    """
    depth = 0
    for place, character in enumerate(text):
        before = text[place - 1] if place else " "
        is_angle = character == "<" and not before.isspace() and not text[:place].endswith("operator")
        if depth == 0:
            yield place, character
        if character in OPENING or is_angle:
            depth += 1
        elif depth and (character in CLOSING or (character == ">" and before not in "-=" and not before.isspace())):
            depth -= 1


def bracket_end(text: str, begin: int) -> int:
    """The place behind the bracket that opens at `begin`."""
    rest = split_top(text[begin + 1 :] + " ")
    for place, character in rest:
        if character in CLOSING or character == ">":
            return begin + place + 2
    return len(text)


def without_template(head: str) -> str:
    """`head` without `template <...>` and constraints in front."""
    while match := re.match(r"template ?<", head):
        head = head[bracket_end(head, match.end() - 1) :].lstrip()
    return head


def read_head(head: str) -> tuple[str, int] | None:
    """(name, number of parameters) of what declares or begins a function; None for anything else."""
    head = without_template(DECORATION.sub(" ", head).strip())
    if SCOPE.match(head) and not head.endswith(")"):
        return None
    for place, character in split_top(head):
        if character == "=" and "operator" not in head[:place]:
            return None
        if character != "(":
            continue
        lead = head[:place].rstrip()
        if lead.endswith("operator"):
            place = head.index("(", place + 1)
        pointer = re.match(r"\(\s*\*\s*(\w+)\s*\)\s*\(", head[place:])
        if pointer:
            place += pointer.end() - 1
        name = pointer[1] if pointer else (re.search(r"([\w~]+|operator\s*\S+)$", lead) or [""])[0]
        if not name or name in NO_NAMES or MACRO.match(name):
            if name in NO_NAMES:
                continue
            return None
        inside = head[place + 1 : bracket_end(head, place) - 1]
        if not inside.strip() or inside.strip() == "void":
            return name, 0
        return name, 1 + sum(character == "," for _, character in split_top(inside))
    return None


def cxx_signatures(text: str) -> Iterator[Signature]:
    """Signatures of a C++ source whose comments, literals and preprocessor lines are blank."""
    # Whether declarations stand in each open brace.
    open_scopes: list[bool] = []
    head_start = num_parentheses = 0
    for place, character in enumerate(text):
        num_parentheses += (character == "(") - (character == ")")
        if character not in "{};:" or num_parentheses:
            continue
        raw = text[head_start:place]
        if character == ":":
            if re.fullmatch(r"\s*(?:public|private|protected)", raw):
                head_start = place + 1
            continue
        if character != "}" and all(open_scopes):
            # An initialiser of a constructor's list is no function.
            found = None if raw.lstrip().startswith(",") else read_head(" ".join(raw.split()))
            if found:
                lead = len(raw) - len(raw.lstrip())
                yield Signature(found[0], text.count("\n", 0, head_start + lead) + 1, found[1])
        if character == "{":
            head = without_template(DECORATION.sub(" ", " ".join(raw.split())).strip())
            open_scopes.append(bool(SCOPE.match(head)) and not head.endswith(")"))
        elif character == "}" and open_scopes:
            open_scopes.pop()
        head_start = place + 1


def python_signatures(text: str) -> Iterator[Signature]:
    """Signatures of a Python source; a method's own `self` or `cls` counts nothing."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        own = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        count = len(own) + len(node.args.kwonlyargs) - (own[:1] in (["self"], ["cls"]))
        yield Signature(node.name, node.lineno, count)

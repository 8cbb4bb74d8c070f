"""Checks what the formatters do not: length of files and functions, parameters, ASCII, words that do not belong.

Exit status 1 names each fault. Limits are those of CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from signatures import cxx_signatures, python_signatures

ROOT = Path(__file__).resolve().parent.parent

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_LINE_LENGTH = 120
MAX_PARAMETERS = 6

# Functions with more parameters, by file. What PyTorch, transformers or diffusers call, or let a caller call, with
# arguments one by one:
FIXED_BY_CALLERS = {
    "bench/pytorch_ring.py": {"_backward"},
    "binding/npu/ops.cc": {"forward", "dropout_gen_mask"},
    "binding/op/autograd_op.cc": {"forward"},
    "python/ringspan/device/registry.py": {"forward", "backward"},
    "python/ringspan/dtensor/sdpa_hook.py": {"scaled_dot_product_attention"},
    "python/ringspan/hf/attention.py": {"_attend"},
    "python/ringspan/hf/masks.py": {"_make_mask"},
    "examples/clients/diffusers_flux.py": {"flash", "flash_backward"},
    "tests/python/standins.py": {"flash", "flash_backward", "efficient", "efficient_backward"},
}
# What users write: names in C++ that take a view each, keywords in Python.
PUBLIC = {
    "ringspan/ring/ring_attention.h": {"ring_backward"},
    "python/ringspan/attention.py": {"attention"},
    "python/ringspan/flex/attention.py": {"flex_attention", "to_arguments"},
    "python/ringspan/flex/masks.py": {"to_mask"},
    "python/ringspan/plan.py": {"plan", "choose_plan"},
}

CODE = {".h", ".cc", ".py"}
TEXT = CODE | {".md", ".cmake", ".txt", ".toml", ".json", ".sh", ".yml", ".in", ""}
# Taken over as they are.
VERBATIM = {"LICENSE"}
# Written in another language.
NOT_ASCII = "docs/tutorial/zh/"

FORBIDDEN = {
    # Paths that exist on one machine only.
    r"(?<![\w.])/(?:root|home|work|mnt|Users)/": "a path of one machine",
    # Spelled in two parts, so that this file passes its own check.
    r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b": "unfinished work",
}

Fault = tuple[str, int, str]

# A C++ block that is no function opens with one of these.
NOT_A_FUNCTION = re.compile(
    r"^(?:inline )?(?:namespace|struct|class|enum|union|extern|if|else|for|while|do|switch|case|try|catch|requires)\b"
)


def repository_files() -> list[Path]:
    """Returns the files that are, or would be, under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    paths = [ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name]
    return [path for path in paths if path.is_file()]


def text_faults(file: str, suffix: str, text: str) -> Iterator[Fault]:
    """Faults of characters and words."""
    lines = text.split("\n")
    if text and lines[-1] != "":
        yield file, len(lines), "no newline at the end"
    for number, line in enumerate(lines, 1):
        if not line.isascii() and not file.startswith(NOT_ASCII):
            yield file, number, "not ASCII"
        if line != line.rstrip():
            yield file, number, "space at the end of the line"
        if suffix in CODE and len(line) > MAX_LINE_LENGTH:
            yield file, number, f"{len(line)} columns, at most {MAX_LINE_LENGTH}"
        for pattern, meaning in FORBIDDEN.items():
            if re.search(pattern, line):
                yield file, number, meaning
    if suffix in CODE and len(lines) - 1 > MAX_FILE_LINES:
        yield file, 1, f"{len(lines) - 1} lines, at most {MAX_FILE_LINES}"
    if suffix == ".h" and not file.endswith("-inl.h") and "#pragma once" not in text:
        yield file, 1, "no #pragma once"


def strip_cxx(text: str) -> str:
    """Blanks comments, literals and preprocessor lines, and keeps the line structure."""
    pattern = r"//[^\n]*|/\*.*?\*/|R\"(\w*)\(.*?\)\1\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
    text = re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.M)


def cxx_functions(text: str) -> Iterator[tuple[int, int]]:
    """Yields (first line, number of lines) of each outermost function body."""
    text = strip_cxx(text)
    head_start, depth_of_function, depth = 0, None, 0
    first_line = 1
    for place, character in enumerate(text):
        if character == "{":
            head = " ".join(text[head_start:place].split())
            if depth_of_function is None and "(" in head and not NOT_A_FUNCTION.match(head):
                depth_of_function = depth
                lead = len(text[head_start:place]) - len(text[head_start:place].lstrip())
                first_line = text.count("\n", 0, head_start + lead) + 1
            depth += 1
            head_start = place + 1
        elif character == "}":
            depth -= 1
            if depth == depth_of_function:
                depth_of_function = None
                yield first_line, text.count("\n", 0, place) + 2 - first_line
            head_start = place + 1
        elif character == ";" and depth_of_function is None:
            head_start = place + 1


def function_faults(file: str, suffix: str, text: str) -> Iterator[Fault]:
    """Faults of length."""
    if suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        # A docstring is contract, not code.
        found = [
            (
                node.lineno,
                node.end_lineno - node.body[0].lineno + 1
                if ast.get_docstring(node) is None
                else node.end_lineno - node.body[0].end_lineno,
            )
            for node in nodes
            if isinstance(node, kinds)
        ]
    else:
        found = list(cxx_functions(text))
    for line, length in found:
        if length > MAX_FUNCTION_LINES:
            yield file, line, f"a function of {length} lines, at most {MAX_FUNCTION_LINES}"


def parameter_faults(file: str, suffix: str, text: str) -> Iterator[Fault]:
    """Functions with too many parameters, and exceptions that are none."""
    found = python_signatures(text) if suffix == ".py" else cxx_signatures(strip_cxx(text))
    large = [signature for signature in found if signature.count > MAX_PARAMETERS]
    allowed = FIXED_BY_CALLERS.get(file, set()) | PUBLIC.get(file, set())
    for name, line, count in large:
        if name not in allowed:
            yield file, line, f"{name} has {count} parameters, at most {MAX_PARAMETERS}"
    for name in sorted(allowed - {signature.name for signature in large}):
        yield file, 1, f"{name} needs no exception from the number of parameters"


def main() -> int:
    """Prints every fault; returns the exit status."""
    faults: list[Fault] = []
    count = 0
    for path in repository_files():
        file, suffix = path.relative_to(ROOT).as_posix(), path.suffix
        if suffix not in TEXT or file in VERBATIM:
            continue
        count += 1
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            faults.append((file, 1, "not a text file"))
            continue
        faults += text_faults(file, suffix, text)
        if suffix in CODE:
            faults += function_faults(file, suffix, text)
            faults += parameter_faults(file, suffix, text)
    print("\n".join(f"{file}:{line}: {fault}" for file, line, fault in faults) or f"style: {count} files, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

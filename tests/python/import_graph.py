"""Which module of the package imports which, read from the sources; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "ringspan"

# module -> the modules that it imports, at the top or within a function
Graph = dict[str, set[str]]


def read_graph(package: Path = PACKAGE) -> Graph:
    """Every import of one module of the package by another.

    `from a import b` counts for a, and for the module a.b where there is one. What TYPE_CHECKING guards counts too: who
    reads the one file has to know the other.
    """
    sources = {_name_of(path, package): path for path in package.rglob("*.py")}
    graph: Graph = {}
    for module, path in sources.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {name for node in ast.walk(tree) for name in _names(node, module, path.name == "__init__.py")}
        graph[module] = {_known(name, sources) for name in named if name.split(".")[0] == package.name} - {module, ""}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group; those of one module are left out."""
    reached = {module: _reach(graph, module) for module in graph}
    groups = {
        tuple(sorted({module, *(other for other in reached[module] if module in reached[other])})) for module in graph
    }
    return sorted(list(group) for group in groups if len(group) > 1)


def _reach(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph.get(waiting.pop(), set()) - found:
            found.add(other)
            waiting.append(other)
    return found


def _name_of(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _known(name: str, modules: Mapping[str, Path]) -> str:
    """The longest module at the front of `name`: what follows is something inside of it."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _names(node: ast.AST, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        start = node.module or ""
        if node.level:
            parts = module.split(".")
            above = parts[: len(parts) - node.level + is_package]
            start = ".".join([*above, *([node.module] if node.module else [])])
        return [start, *(f"{start}.{alias.name}" for alias in node.names)]
    if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
        return [_literal_of(argument) for argument in node.args[:1]]
    return []


def _literal_of(argument: ast.expr) -> str:
    """The text of an argument of import_module; of an f-string what stands before the first value."""
    if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
        return str(argument.values[0].value).rstrip(".")
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""

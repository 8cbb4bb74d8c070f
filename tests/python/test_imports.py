"""Which part of the package may import which, read from all its imports, those within functions too."""

from __future__ import annotations

from pathlib import Path

import pytest
from import_graph import cycles, read_graph

# Programs, measurements, lessons and stand-ins: they use the library, and nobody who uses the library needs them.
TOOLS = ("bench", "report", "fit", "mechanism", "compat")


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_library_imports_no_tool():
    graph = read_graph()
    assert {room_of(module) for module in graph} >= {*TOOLS, "dtensor", "device", "flex", "hf", "attention"}
    wrong = [
        (module, other)
        for module, others in graph.items()
        if room_of(module) not in TOOLS
        for other in others
        if room_of(other) in TOOLS
    ]
    assert wrong == []


def test_lessons_and_stand_ins_import_no_other_tool():
    wrong = [
        (module, other)
        for module, others in read_graph().items()
        if room_of(module) in ("mechanism", "compat")
        for other in others
        if room_of(other) in TOOLS and room_of(other) != room_of(module)
    ]
    assert wrong == []


def test_no_module_is_imported_by_what_it_imports():
    assert cycles(read_graph()) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "town"
    (folder / "inner").mkdir(parents=True)
    return folder


def write(package: Path, **texts: str) -> None:
    for name, text in texts.items():
        (package / f"{name.replace('__', '/')}.py").write_text(text)


def test_imports_of_all_kinds_are_read(package):
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("from . import deep\n")
    (package / "inner" / "deep.py").write_text("from ..plain import x\nimport os, town.late as l\n")
    write(package, plain="x = 1\n", late="def f():\n    from town.inner.deep import g\n    return g\n")
    write(package, named='import importlib\nimportlib.import_module(f"town.inner.{0}")\n')
    write(package, typed="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import town.plain\n")
    graph = read_graph(package)
    assert graph == {
        "town": set(),
        "town.inner": {"town.inner.deep"},
        "town.inner.deep": {"town.plain", "town.late"},
        "town.plain": set(),
        "town.late": {"town.inner.deep"},
        "town.named": {"town.inner"},
        "town.typed": {"town.plain"},
    }
    assert cycles(graph) == [["town.inner.deep", "town.late"]]

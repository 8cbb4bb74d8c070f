"""tests/quick.py: what it names is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from quick import QUICK

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", QUICK)
def test_files_and_tests_are_there(file):
    tree = ast.parse((TESTS / file).read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert found
    assert found >= set(QUICK[file] or ())

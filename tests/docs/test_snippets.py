"""The Python examples of docs/ (test_readme.py has those of the README): run in order, each file in its namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = sorted((ROOT / "docs").rglob("*.md"))
WITH_PYTHON = [path for path in FILES if FENCE.search(path.read_text())]


@pytest.mark.parametrize("path", WITH_PYTHON, ids=[str(path.relative_to(ROOT)) for path in WITH_PYTHON])
def test_examples_run(path):
    text = path.read_text()
    namespace: dict = {"__name__": "snippet"}
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        # Blank lines before it, so that a traceback shows the line of the document.
        exec(compile("\n" * line + found[1], str(path), "exec"), namespace)


def test_the_guide_has_examples():
    assert ROOT / "docs" / "python.md" in WITH_PYTHON


def test_support_table_is_current():
    from ringspan import support

    text = (ROOT / "docs" / "python.md").read_text()
    table = text.split("<!-- support table -->\n")[1].split("<!-- end of support table -->")[0]
    assert table == support.table()


def test_golden_vectors_of_dropout():
    import numpy as np
    import oracle

    text = (ROOT / "docs" / "dropout.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([0-9a-f]{8}) \|$", text, re.MULTILINE)
    assert len(rows) >= 7
    for seed, offset, index, draw in rows:
        seed, offset, group = int(seed), int(offset), int(index) // 4
        counter = np.array([[offset % 2**32, offset >> 32, group % 2**32, group >> 32]], dtype=np.uint32)
        words = oracle.philox(counter, (seed % 2**32, seed >> 32))[0]
        assert f"{words[int(index) % 4]:08x}" == draw

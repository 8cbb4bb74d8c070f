"""The Python examples of docs/: run in order, each file in its namespace, and what they show about their results holds.

test_readme.py has those of the README; test_tutorial.py and test_simulator.py compare what their pages print.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = sorted((ROOT / "docs").rglob("*.md"))
# A page whose examples are one script for four processes.
ON_RANKS = ROOT / "docs" / "training.md"
NEEDED = {"transformers.md": "transformers"}
PRINTING = ROOT / "docs" / "simulator.md", *(ROOT / "docs" / "tutorial").rglob("*.md")
WITH_PYTHON = [path for path in FILES if FENCE.search(path.read_text()) and path not in (ON_RANKS, *PRINTING)]


def script_of(path):
    """All examples of a page, each on the lines that it has there, so that a traceback shows them."""
    text = path.read_text()
    script = ""
    for found in FENCE.finditer(text):
        script += "\n" * (text.count("\n", 0, found.start()) + 1 - script.count("\n")) + found[1]
    return script


def is_check(node):
    """Whether the example says here what its result is."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Assert) or called == "torch.testing.assert_close"


@pytest.mark.parametrize("path", WITH_PYTHON, ids=[str(path.relative_to(ROOT)) for path in WITH_PYTHON])
def test_what_examples_say_of_their_results_holds(path):
    assert any(map(is_check, ast.walk(ast.parse(script_of(path))))), "the page says nothing of its results"
    package = NEEDED.get(path.name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed (tools/requirements-models.txt names it)")
    try:
        exec(compile(script_of(path), str(path), "exec"), {"__name__": "snippet"})
    finally:
        # A page that fails in the middle must not leave its stand-in to the tests that follow.
        if "ringspan.compat.torch_npu" in sys.modules:
            sys.modules["ringspan.compat.torch_npu"].uninstall()


@pytest.mark.slow
def test_training_page_runs_on_four_ranks(pool):
    # The processes of the pool have their default group already.
    begin = 'dist.init_process_group("gloo")\n'
    script = script_of(ON_RANKS)
    assert script.count(begin) == 1
    pool.run("jobs:run_script", 4, watchdog_s=170, script=script.replace(begin, "\n"), name=str(ON_RANKS))


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

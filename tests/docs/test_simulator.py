"""docs/simulator.md: every command and every Python block prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "simulator.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)
SHOWN = [
    (kind, block, after) for (kind, block), (next_kind, after) in itertools.pairwise(BLOCKS) if next_kind == "text"
]


@pytest.mark.parametrize("command", [block for kind, block, _ in SHOWN if kind == ""])
def test_commands_print_what_is_shown(command: str) -> None:
    (expected,) = [after for _, block, after in SHOWN if block == command]
    tool, *arguments = shlex.split(command)
    assert tool == "ringspan"
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected


def test_blocks_run_in_order_and_print_what_is_shown() -> None:
    namespace: dict = {"__name__": "snippet"}
    blocks = [(block, after) for kind, block, after in SHOWN if kind == "python"]
    assert len(blocks) >= 2
    for source, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "simulator.md", "exec"), namespace)
        assert printed.getvalue() == expected


def test_the_page_explains_every_field() -> None:
    import dataclasses

    from ringspan.machines import KernelSpeed, LinkClass, Machine

    rows = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    for kind, prefix in ((Machine, ""), (LinkClass, "."), (KernelSpeed, ".")):
        for field in dataclasses.fields(kind):
            assert f"`{prefix}{field.name}`" in rows

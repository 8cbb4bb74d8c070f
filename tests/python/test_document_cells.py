"""The requirement document's cells for a run on several ranks, cut out of it and run as they stand there.

The document is not part of this repository; without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("RINGSPAN_REQUIREMENTS", ROOT.parent / "shared" / "requirements"))
DOCUMENT = FOLDER / "004_af4c234f09b68180.txt"
WATCHDOG_S = 240

pytestmark = pytest.mark.skipif(
    not DOCUMENT.exists(), reason=f"{DOCUMENT.name} is not at hand; RINGSPAN_REQUIREMENTS names its folder"
)


def cells() -> list[str]:
    """The code of 5.1, 5.2 and 5.3/5.4: from each cell's first statement to the end of its last one."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    starts = ("from tools.project_runtime import", "if RUN_MODE ==", "import json")
    found = []
    for start in starts:
        (begin,) = [place for place, line in enumerate(lines) if line.startswith(start)]
        end = begin + 1
        # An empty line belongs to the cell if code follows it; else prose begins there.
        while end < len(lines) and (is_code(lines[end]) or (lines[end] == "" and is_code(lines[end + 1]))):
            end += 1
        found.append("\n".join(lines[begin:end]) + "\n")
    return found


def is_code(line: str) -> bool:
    """Whether a line may stand inside of a cell: indented, an assignment, a call, or one of few keywords."""
    return bool(re.match(r"\s+\S|[A-Z_a-z]+ = |(print|subprocess)\(|(from|import|if|else)\b", line))


def run(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONIOENCODING"] = "utf-8"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, timeout=WATCHDOG_S, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cells_are_whole():
    for code in cells():
        compile(code, DOCUMENT.name, "exec")
    first, second, third = cells()
    assert "RESULT_PATH" in first.splitlines()[-1]
    assert "--output" in second
    assert "required" in third


def test_as_they_are():
    printed = run("".join(cells()))
    assert "'run_mode': 'dry_run'" in printed
    # The second cell says in its own line that nothing was started.
    assert printed.splitlines()[1].startswith("dry_run")


@pytest.mark.slow
def test_with_real_ranks():
    label = f"test-{uuid.uuid4().hex}"
    code = "".join(cells()).replace("RUN_LABEL = 'default'", f"RUN_LABEL = '{label}'")
    code = code.replace("RUN_MODE = 'dry_run'", "RUN_MODE = 'real_gpu'")
    output = ROOT / "benchmarks" / "results" / f"par_context_attention_{label}.json"
    try:
        printed = run(code)
        result = json.loads(output.read_text())
    finally:
        output.unlink(missing_ok=True)
    assert label in printed
    assert result["failure"] is None
    assert result["evidence_level"] in ("measured_cpu", "measured_accelerator")
    # 2048 positions on two ranks, 8 heads, K and V of 64 numbers of 2 bytes.
    whole = 2048 * 8 * 2 * 64 * 2
    metrics = result["metrics"]
    assert metrics["replicated_kv_bytes_per_rank"] == whole
    assert metrics["local_kv_bytes_per_rank"] == metrics["kv_exchange_bytes_per_rank"] == whole // 2
    assert metrics["exposed_exchange_ms_proxy"] >= 0
    assert metrics["max_abs_error"] <= 2.0**-6

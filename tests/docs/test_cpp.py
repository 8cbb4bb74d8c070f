"""The C++ examples and the guide on them (docs/cpp.md)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "main"
EXAMPLES = ROOT / "examples" / "cpp"
GUIDE = (ROOT / "docs" / "cpp.md").read_text()


@pytest.mark.slow
def test_the_torch_example_runs_without_python() -> None:
    if not (BUILD / "CTestTestfile.cmake").exists():
        pytest.skip("the C++ core was not built here (make test builds it)")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_install.py", BUILD, "--torch"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch_example" in done.stdout


def test_the_operators_need_no_python() -> None:
    import importlib.util

    library = importlib.util.find_spec("ringspan._C").origin
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in needed
    assert "python" not in {line.split("=>")[0].strip().split(".so")[0] for line in needed.splitlines()}
    assert not re.search(r"lib(torch_)?python", needed)


def squeezed(text: str) -> str:
    """Without the differences that indentation and line breaks make."""
    return re.sub(r"\s+", "", text)


def test_every_block_of_the_guide_stands_in_an_example() -> None:
    sources = squeezed("".join(path.read_text() for path in sorted(EXAMPLES.glob("*.[hc]*"))))
    blocks = re.findall(r"^```cpp\n(.*?)^```$", GUIDE, flags=re.M | re.S)
    assert len(blocks) >= 4
    for block in blocks:
        for part in block.split("// ...\n"):
            assert squeezed(part) in sources, part

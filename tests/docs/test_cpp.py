"""The guide for C++ (docs/cpp.md) against its examples, which tools/check_install.py builds and runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
GUIDE = (ROOT / "docs" / "cpp.md").read_text()


def test_the_operators_need_no_python() -> None:
    library = importlib.util.find_spec("ringspan._C").origin
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in needed
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

"""Runs every example of the README, as it stands there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BUILD = ROOT / "build" / "main"


def blocks(language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.M | re.S)


def run(command: list[str | Path], cwd: Path) -> str:
    """Runs a command to its success and returns what it printed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_python_example_runs_on_two_processes(tmp_path: Path) -> None:
    (source,) = blocks("python")
    (tmp_path / "attend.py").write_text(source)
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    assert "torchrun --standalone --nproc_per_node 2 attend.py" in source
    run([*launcher, "--standalone", "--nproc_per_node", "2", "attend.py"], tmp_path)


def test_the_cxx_example_builds_with_find_package_and_runs(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    if cmake is None or not (BUILD / "CMakeCache.txt").exists():
        pytest.skip("the C++ core was not built here (make test builds it)")
    (source,) = blocks("cpp")
    (tmp_path / "main.cc").write_text(source)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(example CXX)\nfind_package(ringspan REQUIRED)\n"
        "add_executable(example main.cc)\ntarget_link_libraries(example PRIVATE ringspan::core)\n"
    )
    run([cmake, "--install", BUILD, "--component", "core", "--prefix", tmp_path / "prefix"], ROOT)
    run([cmake, "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}"], tmp_path)
    run([cmake, "--build", "build"], tmp_path)
    printed = run([tmp_path / "build" / "example"], tmp_path)
    assert sorted(re.findall(r"rank (\d) sent (\d+) bytes", printed)) == [
        # Three hops of K and V, 250 rows, 2 heads, 64 wide, 4 bytes.
        (str(rank), str(3 * 2 * 250 * 2 * 64 * 4))
        for rank in range(4)
    ]


@pytest.mark.parametrize(
    "line", [line for block in blocks("") for line in block.splitlines() if line[:9] == "ringspan "]
)
def test_every_command_line_runs(line: str, tmp_path: Path) -> None:
    tool = shutil.which("ringspan", path=str(Path(sys.executable).parent))
    assert tool is not None, "the package installs the tool next to its Python"
    (tmp_path / "python").symlink_to(ROOT / "python")  # the examples of machines, named as from a checkout
    assert run([tool, *shlex.split(line)[1:]], tmp_path).strip()


def test_links_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for document in documents:
        prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#]+)", prose):
            assert "://" in link or (document.parent / link).exists(), f"{document.name}: {link}"

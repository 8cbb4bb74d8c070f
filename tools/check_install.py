"""Installs what a build offers to C++ and proves it: examples/cpp, copied out of the checkout, is configured with
find_package, built and run, and must print what its README shows: the examples of the transports, or with --torch that
of LibTorch alone.

    python tools/check_install.py BUILD [--torch]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "cpp"

# More ranks than cores, and root in a container, are errors for Open MPI unless it is told.
ENVIRONMENT = os.environ | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}

REQUIRES_MPI = """cmake_minimum_required(VERSION 3.22)
project(asks_for_mpi LANGUAGES CXX)
find_package(ringspan REQUIRED COMPONENTS mpi)
"""


def run(command: list[str | Path] | str, cwd: Path, succeeds: bool = True) -> str:
    """Runs a command, or a line of shell, and returns what it printed; exits where it ends in another way."""
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, shell=isinstance(command, str), capture_output=True, text=True, timeout=600
    )
    if (done.returncode == 0) != succeeds:
        shown = command if isinstance(command, str) else shlex.join(map(str, command))
        sys.exit(f"{shown}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout if succeeds else done.stdout + done.stderr


def commands_of(readme: str) -> list[tuple[str, str]]:
    """Returns each command line of the console blocks with the output that is shown under it."""
    blocks = re.findall(r"^```console\n(.*?)^```$", readme, flags=re.M | re.S)
    return [
        (command.replace("\\\n", " "), output)
        for block in blocks
        for command, output in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.M)
    ]


def check_refusal(cmake: str, prefix: Path, folder: Path) -> None:
    """A package without MPI that is asked for it says so."""
    (folder / "CMakeLists.txt").write_text(REQUIRES_MPI)
    printed = run([cmake, "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}"], folder, succeeds=False)
    if "built without MPI" not in printed:
        sys.exit(f"no word about MPI in what a project is told that asks for it:\n{printed}")


def check(build: Path, with_torch: bool, folder: Path) -> None:
    cmake = shutil.which("cmake", path=ENVIRONMENT["PATH"]) or "cmake"
    prefix, project = folder / "prefix", folder / "cpp"
    run([cmake, "--install", build, "--component", "core", "--prefix", prefix], folder)
    shutil.copytree(EXAMPLES, project)
    paths = [str(prefix)]
    if with_torch:
        paths.append(run([sys.executable, "-c", "import torch; print(torch.utils.cmake_prefix_path)"], folder).strip())
    arguments = [f"-DCMAKE_PREFIX_PATH={';'.join(paths)}", f"-DWITH_TORCH={'ON' if with_torch else 'OFF'}"]
    run([cmake, "-S", ".", "-B", "build", *arguments], project)
    target = "torch_example" if with_torch else "all"
    run([cmake, "--build", "build", "--parallel", "2", "--target", target], project)

    mpi_targets = next(prefix.rglob("ringspanMpiTargets.cmake"), None)
    built = {path.name for path in (project / "build").glob("*_example")}
    of_transports = {"inproc_example", "mpi_example"} if mpi_targets else {"inproc_example"}
    expected = {"torch_example"} if with_torch else of_transports
    if built != expected:
        sys.exit(f"built {sorted(built)}, expected {sorted(expected)}")
    shown = [
        (command, output)
        for command, output in commands_of((EXAMPLES / "README.md").read_text())
        if any(name in command for name in built)
    ]
    if len(shown) != len(built):
        sys.exit(f"README.md shows {len(shown)} commands for {len(built)} programs")
    for command, output in shown:
        printed = run(command, project)
        if printed != output:
            sys.exit(f"{command}\nprinted\n{printed}README.md shows\n{output}")
        print(f"{command}: as README.md shows")
    if mpi_targets and not with_torch:
        mpi_targets.unlink()
        (folder / "refusal").mkdir()
        check_refusal(cmake, prefix, folder / "refusal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="a build folder in which everything is built")
    parser.add_argument("--torch", action="store_true", help="the LibTorch example instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check(options.build.resolve(), options.torch, Path(folder))


if __name__ == "__main__":
    main()

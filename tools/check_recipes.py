"""Proves the recipes of docs/recipes: applies their patches to a copy of the sources, builds it and runs what is new.

    python tools/check_recipes.py [BUILD_FOLDER]

A patch may change at most four files of the product beside new ones and tests: what a recipe says, and no more. Exit
status 1 tells what failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ("mask", "schedule", "pair_input")
MOST_FILES = 4
# Files that hold the thing itself, so that no recipe counts them.
OWN = {"ringspan/kernel/pairs-inl.h"}

VERIFY = ("verify", "--seq-len", "37", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--mask", "blocks:5")
RUNS = [
    (*VERIFY, "--schedule", "back_ring", "--shard", "striped", "--world", "3"),
    (*VERIFY, "--schedule", "back_ring", "--shard", "lengths:30,0,7", "--world", "3", "--dtype", "bf16", "--sink"),
    (*VERIFY, "--schedule", "back_ring", "--world", "1"),
    (*VERIFY, "--schedule", "all", "--shard", "head_tail", "--world", "4", "--bias", "rows", "--dropout", "0.1"),
]
TESTS = ("tests/python/test_blocks.py", "tests/python/test_hardcap.py")
# An editable install finds its own package first, wherever the path says.
RUN_TESTS = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
sys.path.insert(0, sys.argv.pop(1))
import pytest, ringspan
assert ringspan.__file__.startswith(sys.path[0]), ringspan.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


def changed_files(patch: str) -> list[str]:
    """The files of the product that a patch changes, new ones and tests apart."""
    files = []
    for part in patch.split("diff --git ")[1:]:
        name = part.split()[0].removeprefix("a/")
        if "new file mode" not in part and not name.startswith(("tests/", "docs/")) and name not in OWN:
            files.append(name)
    return files


def copy_sources(tree: Path) -> None:
    """All tracked and new files; times stay, so that a second run compiles what changed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    shutil.rmtree(tree, ignore_errors=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def main() -> int:
    """Returns the exit status."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "recipes").resolve()
    tree = folder / "tree"
    copy_sources(tree)
    # A repository of its own: git would else take the paths for those of the one around it.
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    for name in PATCHES:
        patch = ROOT / "tests" / "recipes" / f"{name}.patch"
        files = changed_files(patch.read_text())
        print(f"recipe {name}: {len(files)} files beside its own and tests: {', '.join(files)}", flush=True)
        if len(files) > MOST_FILES:
            print(f"recipe {name} changes {len(files)} files; at most {MOST_FILES}")
            return 1
        subprocess.run(["git", "apply", str(patch)], cwd=tree, check=True)

    environment = os.environ | {"CCACHE_BASEDIR": str(tree), "CCACHE_NOHASHDIR": "1"}
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DRINGSPAN_TORCH=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    build = tree / "build" / "main"
    subprocess.run(["cmake", "-S", tree, "-B", build, "-G", "Ninja", *options], check=True, stdout=subprocess.DEVNULL)
    targets = ["--target", "ringspan_cli", "ringspan_binding"]
    subprocess.run(["cmake", "--build", build, *targets], check=True, env=environment)
    for arguments in RUNS:
        print("ringspan", *arguments, flush=True)
        subprocess.run([build / "ringspan", *arguments], check=True, timeout=300)
    shutil.copy2(build / "_C.so", tree / "python" / "ringspan" / "_C.so")
    command = [sys.executable, "-c", RUN_TESTS, str(tree / "python"), "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command, cwd=tree, env=environment, timeout=600, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

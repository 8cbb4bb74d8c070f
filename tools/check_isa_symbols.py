#!/usr/bin/env python3
"""Checks that kernel objects share no weak symbol across instruction sets.

    tools/check_isa_symbols.py build/release/.../isa_*.cc.o

Each isa_NAME.cc is compiled with the flags of its instruction set. An inline function or template that it shares with
another translation unit is a weak symbol under one name in both, and the linker keeps either copy: perhaps the one
that this CPU cannot run. So every weak symbol of such an object must carry the namespace ringspan::NAME in its name.

Exit status: 0 all clean, 1 a symbol is shared, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

WEAK_TYPES = "wWvVu"
# Pointers that the compiler adds for exception tables: data, the same whatever the flags.
HARMLESS = re.compile(r"^DW\.ref\.")
OBJECT_NAME = re.compile(r"^(?:isa|emulated)_(\w+)\.(?:cc\.|cpp\.)?o(?:bj)?$")


def namespaces_of(path: Path) -> list[str]:
    """Namespaces that the symbols of an object may live in; ValueError where the file name does not say."""
    match = OBJECT_NAME.match(path.name)
    if match is None:
        raise ValueError(f"{path} is not named isa_NAME.cc.o, so its instruction set is unknown")
    return [f"ringspan::{prefix}{match.group(1)}::" for prefix in ("", "emulated_")]


def shared_symbols(nm_output: str, namespaces: list[str]) -> list[str]:
    """Demangled weak symbols, out of `nm -C --defined-only`, that none of the namespaces occurs in."""
    shared = []
    for line in nm_output.splitlines():
        match = re.match(r"^[0-9a-fA-F]* *([A-Za-z]) (.+)$", line)
        if match is None or match.group(1) not in WEAK_TYPES:
            continue
        name = match.group(2)
        if not HARMLESS.match(name) and not any(namespace in name for namespace in namespaces):
            shared.append(name)
    return shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", type=Path, help="object files named isa_NAME.cc.o")
    parser.add_argument("--nm", default="nm", help="the nm program")
    args = parser.parse_args()

    num_shared = 0
    for path in args.objects:
        try:
            namespaces = namespaces_of(path)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        run = subprocess.run([args.nm, "-C", "--defined-only", str(path)], capture_output=True, text=True)
        if run.returncode != 0:
            print(run.stderr.strip(), file=sys.stderr)
            return 2
        for name in shared_symbols(run.stdout, namespaces):
            print(f"{path}: weak symbol outside {namespaces[0]} {name}")
            num_shared += 1
    print(f"{len(args.objects)} objects, {num_shared} shared weak symbols")
    return 1 if num_shared else 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks who includes whom: every #include line of the C++ sources against the table of layers.

    base < shape < mask < shard < plan < ledger < sim
           shape < view < softmax
                   {mask, softmax, view} < kernel
    base < transport (the interface) < its folders inproc, mpi
                   {plan, kernel, transport} < ring

A layer may include itself and all that stands below it. The build holds the same table as link dependencies
(cmake/RingspanLayers.cmake); this script also sees headers, which no linker does. Exit status 1 names each bad line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BELOW = {
    "base": [],
    "shape": ["base"],
    "mask": ["shape"],
    "shard": ["mask"],
    "plan": ["shard"],
    "view": ["shape"],
    "softmax": ["view"],
    "kernel": ["mask", "softmax", "view"],
    "transport": ["base"],
    "ring": ["plan", "kernel", "transport"],
    "ledger": ["plan"],
    "sim": ["ledger"],
}

# Files, and folders by their "/" at the end, that may include less than their layer: layers, and files beside these.
# The ring loop is written once, for every backend: it sees the plan and the verbs of a backend, no tensor or transport.
# A transport sees the interface and no other transport.
ONLY = {
    "ringspan/ring/executor.h": (["plan"], ["ringspan/ring/backend.h"]),
    "ringspan/transport/inproc/": (["base"], ["ringspan/transport/transport.h", "ringspan/transport/inproc/inproc.h"]),
    "ringspan/transport/mpi/": (["base"], ["ringspan/transport/transport.h", "ringspan/transport/mpi/mpi.h"]),
}

# Libraries of others: prefix of the include -> folders that may use it.
THIRD_PARTY = {
    "torch/": ["binding", "examples/cpp"],
    "ATen/": ["binding", "examples/cpp"],
    "c10/": ["binding"],
    "Python.h": [],
    "nlohmann/": ["ringspan/plan", "ringspan/ledger", "ringspan/sim", "cli", "tests", "bench"],
    "CLI/": ["cli"],
    "gtest/": ["tests"],
    "gmock/": ["tests"],
    "benchmark/": ["bench"],
    "mpi.h": ["ringspan/transport/mpi", "tests/ringspan/transport/mpi", "examples/cpp"],
}

# Outside the core: folder -> first folders of the repository that it may include.
OUTSIDE = {
    "cli": ["ringspan", "cli"],
    "binding": ["ringspan", "binding"],
    "tests": ["ringspan", "tests", "cli"],
    "bench": ["ringspan", "bench"],
    "examples": ["ringspan"],
}

# Rooms of a folder: room -> rooms whose files it may include, beside its own.
ROOMS = {
    "binding": {
        "base": [],
        "watch": ["base"],
        "group": ["base", "watch"],
        "op": ["base", "watch", "group"],
        "npu": ["base", "watch", "group", "op"],
        "ask": ["base", "watch", "group", "op", "npu"],
    },
    # A proof that asked the builders would ask the accused.
    "ringspan/plan": {"schedules": [], "proof": []},
}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def with_all_below(layers: list[str]) -> set[str]:
    """Returns the layers and everything under them."""
    found: set[str] = set()
    pending = list(layers)
    while pending:
        layer = pending.pop()
        found.add(layer)
        pending += BELOW[layer]
    return found


def fault_of_core(file: str, include: str) -> str | None:
    """Says what is wrong with a core file that includes a file of the repository; None if nothing is."""
    parts = include.split("/")
    if parts[0] != "ringspan":
        return "the core includes only ringspan/..."
    layer = file.split("/")[1]
    if layer == "ringspan.h":
        return None
    if layer not in BELOW:
        return f"layer {layer} is not in the table"
    if len(parts) < 3 or parts[1] not in BELOW:
        return "no layer may include the umbrella header" if include == "ringspan/ringspan.h" else "no such layer"
    place = next((place for place in ONLY if file == place or (place.endswith("/") and file.startswith(place))), None)
    if place:
        layers, files = ONLY[place]
        allowed = with_all_below(layers)
        return None if include in files or parts[1] in allowed else f"it may see only {', '.join([*layers, *files])}"
    allowed = with_all_below([layer])
    return None if parts[1] in allowed else f"{layer} may include only {', '.join(sorted(allowed))}"


def fault_of_room(file: str, include: str) -> str | None:
    """Says what is wrong where a file of a room includes a file of another room; None if nothing is."""
    for folder, rooms in ROOMS.items():
        here, there = (re.match(f"{folder}/([a-z]+)/", name) for name in (file, include))
        if here is None or there is None or here[1] == there[1]:
            continue
        if here[1] not in rooms or there[1] not in rooms[here[1]]:
            return f"{folder}/{here[1]} may include only {', '.join(rooms.get(here[1], []))} beside itself"
    return None


def fault_of(file: str, quoted: bool, include: str) -> str | None:
    """Says what is wrong with one #include line; None if nothing is."""
    for prefix, folders in THIRD_PARTY.items():
        if include.startswith(prefix):
            if any(file.startswith(folder + "/") for folder in folders):
                return None
            return f"{prefix} belongs to {', '.join(folders) or 'no folder'}"
    first = include.split("/")[0]
    if not quoted:
        return "files of the repository are included with quotes" if first in ("ringspan", *OUTSIDE) else None
    # Examples are projects of their own, which a user copies: their files name their neighbours.
    if file.startswith("examples/") and "/" not in include:
        return None if ((ROOT / file).parent / include).is_file() else "no such file beside it"
    if not (ROOT / include).is_file():
        return "no such file (paths start at the repository root)"
    folder = file.split("/")[0]
    fault = fault_of_room(file, include)
    if fault or folder == "ringspan":
        return fault or fault_of_core(file, include)
    return None if first in OUTSIDE[folder] else f"{folder} may include only {', '.join(OUTSIDE[folder])}"


def main() -> int:
    """Prints every fault; returns the exit status."""
    faults = []
    files = [path for folder in ("ringspan", *OUTSIDE) for path in sorted((ROOT / folder).rglob("*"))]
    sources = [path for path in files if path.suffix in (".h", ".cc")]
    for path in sources:
        file = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            fault = fault_of(file, match[1] == '"', match[2]) if match else None
            if fault:
                faults.append(f"{file}:{number}: {match[2]}: {fault}")
    print("\n".join(faults) if faults else f"layers: {len(sources)} files, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

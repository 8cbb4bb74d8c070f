"""The bench: times the kernels and the ring, checks every result, and says which targets are met.

    python bench/run.py [--quick] [--only 'ring/bf16/*'] [--threads 1 2] [--out out/bench]

Writes one JSON file for each family of rows. Exit status: 0; 1 if a result is wrong, or, with --require-targets, a
target is missed; 2 for bad arguments.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from session import enter_own_session

    # Before torch is imported: it starts threads.
    enter_own_session()

import argparse
import fnmatch
from types import ModuleType

import cost_rows
import decode_rows
import kernel_rows
import pair_rows
import peak
import ring_rows
import sim_rows
from output import Output
from ringspan.bench.launch import RankFailed
from settings import Settings

# Timed in this order; a family's rows go into the file of its name.
FAMILIES: dict[str, ModuleType] = {
    "kernel": kernel_rows,
    "decode": decode_rows,
    "pairs": pair_rows,
    "ring": ring_rows,
    "cost": cost_rows,
    "sim": sim_rows,
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Times kernels and ring against PyTorch's, and checks the results.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all works, times mean nothing")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="rows to run, such as 'ring/bf16/*'")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and run nothing")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the single process (default 1 2)")
    parser.add_argument("--budget", type=float, default=1.5, metavar="S", help="seconds for a row, at least 2 rounds")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--require-targets", action="store_true", help="exit with 1 where a target is missed")
    parsed = parser.parse_args(arguments)
    if min(parsed.threads) < 1:
        parser.error(f"--threads is {parsed.threads}; give at least 1")
    return parsed


def main(arguments: list[str]) -> int:
    """Runs the selected rows; returns the exit status."""
    parsed = parse_arguments(arguments)
    settings = Settings(parsed.quick, tuple(parsed.threads), 0.05 if parsed.quick else parsed.budget)
    selected = {
        family: [name for name in module.names(settings) if any(fnmatch.fnmatch(name, glob) for glob in parsed.only)]
        for family, module in FAMILIES.items()
    }
    if not any(selected.values()):
        print(f"no row is named like {' or '.join(parsed.only)}; --list shows the names", file=sys.stderr)
        return 2
    if parsed.list:
        print("\n".join(name for names in selected.values() for name in names))
        return 0
    output = Output(parsed.out, parsed.quick, sum(map(len, selected.values())))
    try:
        peak.load_library()
        for family, module in FAMILIES.items():
            for row in module.run(selected[family], settings):
                output.add(family, row)
    except (peak.PeakMissing, RankFailed) as failure:
        print(f"The bench failed: {failure}", file=sys.stderr)
        return 1
    output.finish()
    return output.exit_status(parsed.require_targets)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

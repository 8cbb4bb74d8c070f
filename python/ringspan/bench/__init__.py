"""The multi-rank benchmark: does the exchange of K/V hide behind the computation, and what does it cost?

Run as `torchrun --standalone --nproc_per_node 2 -m ringspan.bench ...`; docs/benchmark.md describes options and files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark with `arguments` (default: those of the process); the exit status.

    0: done. 1: the run failed, or a package of the extra `bench` is missing. 2 (by SystemExit too): bad arguments.
    """
    try:
        from ringspan.bench.command import run_command
    except ModuleNotFoundError as error:
        print(f"ringspan.bench needs {error.name}; install ringspan[bench]", file=sys.stderr)
        return 1
    return run_command(sys.argv[1:] if arguments is None else list(arguments))

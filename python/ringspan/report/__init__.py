"""The report on result files of `ringspan.bench`: one HTML page, one Markdown file, or plain data.

Run as `python -m ringspan.report FOLDER`; docs/report.md describes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the report with `arguments` (default: those of the process); the exit status.

    0: done. 1: no usable file, a failed run and --strict, or a package of the extra `report` is missing. 2 (by
    SystemExit too): bad arguments.
    """
    try:
        from ringspan.report.command import run_command
    except ModuleNotFoundError as error:
        print(f"ringspan.report needs {error.name}; install ringspan[report]", file=sys.stderr)
        return 1
    return run_command(sys.argv[1:] if arguments is None else list(arguments))

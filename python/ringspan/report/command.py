"""The command line of the report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ringspan.report.content import load, table_of
from ringspan.report.page import html
from ringspan.report.text import failures_of, markdown


def run_command(arguments: Sequence[str]) -> int:
    """See `main` in ringspan/report/__init__.py."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"FOLDER is {str(options.folder)!r}, which is no folder; give the one that holds the result files")
    for flag, path in (("--html", options.html), ("--markdown", options.markdown)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            parser.error(f"{flag} is {str(path)!r}; give a file in a folder that exists")
    folder = load(options.folder)
    rows = table_of(folder.runs)
    try:
        if options.html:
            options.html.write_text(html(folder, rows), encoding="utf-8")
        if options.markdown:
            options.markdown.write_text(markdown(folder, rows), encoding="utf-8")
    except OSError as error:
        parser.error(f"the report could not be written: {error}")
    if options.json:
        rejected = [{"file": name, "reason": reason} for name, reason in folder.rejected]
        content = {"failures": failures_of(folder), "rows": rows, "rejected": rejected}
        print(json.dumps(content, indent=2))
    elif not (options.html or options.markdown):
        print(markdown(folder, rows), end="")
    for name, reason in folder.rejected:
        print(f"left out {name}: {reason}", file=sys.stderr)
    if not folder.runs:
        print(f"{options.folder} holds no result of the benchmark", file=sys.stderr)
        return 1
    return int(options.strict and any(run.failed for run in folder.runs))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ringspan.report",
        description="Reads the result files of ringspan.bench in a folder; prints Markdown where no file is asked for.",
        epilog="Exit status: 0; 1 without a usable file, with --strict also for a failed run; 2 for bad arguments.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="holds the result files (*.json)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the same without figures")
    parser.add_argument("--json", action="store_true", help="print rows, failures and other files as JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a run has failed")
    return parser

"""Numbers and texts as a reader sees them, and the report in Markdown."""

from __future__ import annotations

import re
from typing import Any

from ringspan.report.content import Folder, describe_workload, threads_of

COLUMNS = (
    "run",
    "workload",
    "ranks",
    "path",
    "ms: median [p10, p90]",
    "tokens/s",
    "bytes: ledger / counted",
    "exposed ms",
    "overlap share",
    "decision",
)
# Left-aligned columns; all others hold numbers.
TEXT_COLUMNS = {"run", "workload", "path", "decision"}
# What all rows of a run share.
RUN_COLUMNS = {"run", "workload", "ranks", "decision"}
_NONE = "-"


def cells_of(row: dict[str, Any]) -> list[str]:
    """The cells of a row of `content.table_of`, in the order of COLUMNS, not escaped."""
    time = _NONE
    if row["median_ms"] is not None:
        time = f"{row['median_ms']:.2f} [{row['p10_ms']:.2f}, {row['p90_ms']:.2f}]"
    bytes_shown = _NONE
    if row["bytes_ledger"] is not None:
        bytes_shown = f"{_of_ranks(row['bytes_ledger'])} / {_of_ranks(row['bytes_counted'])}"
    return [
        row["label"],
        f"{row['workload']}: {row['sizes']}",
        str(row["ranks"]),
        row["path"] or _NONE,
        time,
        _NONE if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.0f}",
        bytes_shown,
        _NONE if row["exposed_ms"] is None else f"{row['exposed_ms']:.2f}",
        _NONE if row["overlap_share"] is None else f"{row['overlap_share']:.0%}",
        row["decision"],
    ]


def failures_of(folder: Folder) -> list[dict[str, str]]:
    """Label, file, kind, rank and message of every failed run."""
    return [
        {
            "label": run.result["run"]["label"],
            "file": run.file,
            "kind": failure["kind"],
            "rank": "all ranks" if failure["rank"] is None else f"rank {failure['rank']}",
            "message": failure["message"],
        }
        for run in folder.runs
        if (failure := run.result["failure"])
    ]


def runs_of(folder: Folder) -> list[dict[str, str]]:
    """What each run was, on which machine, and what was decided."""
    found = []
    for run in folder.runs:
        about, hardware, decision = run.result["run"], run.result["hardware"], run.result["decision"]
        warnings = [f"{e['check']}: {e['detail']}" for e in run.result["preflight"] if e["status"] == "warning"]
        found.append(
            {
                "label": about["label"],
                "file": run.file,
                "sizes": describe_workload(run.result["workload"]),
                "evidence": run.result["evidence_level"],
                "decision": decision["value"],
                "rule": decision["rule"],
                "reason": decision["reason"],
                "machine": (
                    f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['instruction_set']}, "
                    f"{hardware['backend']} on {hardware['device']}, {threads_of(hardware)}, torch {hardware['torch']}"
                ),
                "date": about["date"],
                "commit": about["commit"] or "unknown",
                "command": about["command"],
                "warnings": "; ".join(warnings),
            }
        )
    return found


def markdown(folder: Folder, rows: list[dict[str, Any]]) -> str:
    """The report without figures."""
    lines = ["# Benchmark report", ""]
    failures = failures_of(folder)
    if failures:
        lines += ["## Failures", ""]
        lines += [
            f"- **{_escape(f['label'])}** ({_escape(f['file'])}): {_escape(f['kind'])}, {f['rank']}: "
            f"{_escape(f['message'])}"
            for f in failures
        ]
        lines.append("")
    lines += ["## Results", ""]
    lines.append("| " + " | ".join(COLUMNS) + " |")
    lines.append("|" + "|".join("---" if name in TEXT_COLUMNS else "---:" for name in COLUMNS) + "|")
    lines += ["| " + " | ".join(map(_escape, cells_of(row))) + " |" for row in rows]
    lines += ["", "## Runs", ""]
    for run in runs_of(folder):
        lines.append(f"- **{_escape(run['label'])}** ({_escape(run['file'])}), {_escape(run['sizes'])}")
        lines.append(f"  - {_escape(run['decision'])} by {_escape(run['rule'])}: {_escape(run['reason'])}")
        lines.append(f"  - {_escape(run['evidence'])}, {_escape(run['date'])}, commit {_escape(run['commit'])}")
        lines.append(f"  - {_escape(run['machine'])}")
        lines.append(f"  - {_escape(run['command'])}")
        lines += [f"  - warning: {_escape(run['warnings'])}"] if run["warnings"] else []
    if folder.rejected:
        lines += ["", "## Files that are no results", ""]
        lines += [f"- {_escape(name)}: {_escape(reason)}" for name, reason in folder.rejected]
    return "\n".join(lines) + "\n"


def _of_ranks(counts: list[int]) -> str:
    """One number where all ranks are alike, else the smallest and the largest."""
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _escape(text: str) -> str:
    """Text that means nothing to Markdown, nor to the HTML that it may contain, on one line."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore inside a word is a letter; names are to stay readable.
    return re.sub(r"([\\`*\[\]|#~$!]|(?<!\w)_|_(?!\w))", r"\\\1", text)

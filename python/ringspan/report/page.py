"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jinja2

from ringspan.report.content import Folder
from ringspan.report.figures import draw_all
from ringspan.report.text import COLUMNS, RUN_COLUMNS, TEXT_COLUMNS, cells_of, failures_of, runs_of


def html(folder: Folder, rows: list[dict[str, Any]]) -> str:
    """The whole page. Every text that comes from a file is escaped; only the figures' SVG is taken as it is."""
    loader = jinja2.FileSystemLoader(Path(__file__).resolve().parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    shown = []
    for _, group in itertools.groupby(rows, key=lambda row: row["file"]):
        of_run = list(group)
        for place, row in enumerate(of_run):
            # What all rows of a run share stands in the first one.
            span = 0 if place else len(of_run)
            cells = zip(COLUMNS, cells_of(row), strict=True)
            spanned = [(name, cell, span if name in RUN_COLUMNS else 1) for name, cell in cells]
            shown.append({"failed": row["failed"], "cells": spanned, "first": span > 0})
    return environment.get_template("page.html.j2").render(
        columns=COLUMNS,
        text_columns=TEXT_COLUMNS,
        rows=shown,
        failures=failures_of(folder),
        runs=runs_of(folder),
        rejected=folder.rejected,
        pictures=draw_all(folder.runs),
    )

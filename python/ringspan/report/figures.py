"""Figures as inline SVG: text stays text, and what is not a series takes the colour of the page's text."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ringspan.bench.config import SCHEDULE_EXCHANGE
from ringspan.report.content import Loaded, describe_workload, threads_of

# Stands for the colour of the page's text, which differs between light and dark; no series uses it.
_INK = "#010203"
# Told apart on white and on black, and without red against green. Of hybrid and double_ring, which come with numbers of
# ranks, each has its own kind of line as well.
_COLOURS = {
    "replicated": "#8a8a8a",
    "gathered": "#d1700f",
    "ring_local": "#7d8fb3",
    "ring_all_to_all": "#2f7fd6",
    "ring_p2p": "#b04fc4",
    "ring_all_gather": "#12958a",
    "gather_all_gather": "#12958a",
    "gather": "#c9a227",
    "ulysses": "#d6486b",
    "pruned": "#4f9d3a",
    "q_ring": "#6a5acd",
    "invariant": "#708090",
    "hybrid": "#e08a7d",
    "double_ring": "#3fb6d9",
    "other": "#a07c5b",  # a schedule without a colour of its own
}
_MARKERS = dict(zip(_COLOURS, "sDvo^P8<>XdphH*", strict=False))
_LINES = ("-", "--", ":", "-.")
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.labelcolor": _INK,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Picture:
    """One figure: a heading, what it shows in words, and its SVG."""

    title: str
    caption: str
    svg: str


def draw_all(runs: list[Loaded]) -> list[Picture]:
    """Time and bytes against ranks and against length, where a series has two points; schedules; exposed shares."""
    timed = [run for run in runs if run.result["evidence_level"].startswith("measured") and not run.failed]
    drawn = [
        *_against(timed, "ranks", "ranks", lambda run: run.result["hardware"]["ranks"]),
        *_against(timed, "sequence length", "positions", lambda run: run.result["workload"]["seq_len"]),
        *_schedules(timed),
        *_exposed(timed),
    ]
    return [Picture(title, caption, _svg(figure, number)) for number, (title, caption, figure) in enumerate(drawn, 1)]


def _against(runs: list[Loaded], what: str, unit: str, place: Callable[[Loaded], int]) -> list[tuple[str, str, Figure]]:
    """A figure for each set of runs that differ in `place` alone; of runs alike in that too, the latest counts."""
    groups: dict[str, dict[int, Loaded]] = {}
    for run in sorted(runs, key=lambda run: run.result["run"]["date"]):
        groups.setdefault(_setting(run, what), {})[place(run)] = run
    drawn = []
    for setting, points in sorted(groups.items()):
        if len(points) < 2:
            continue
        with mpl.rc_context(_STYLE):
            names = len(_lines_of(list(points.values())))
            # A row of the legend holds four names.
            figure = Figure(figsize=(10, 3.6 + 0.2 * -(-names // 4)), layout="constrained")
            times, sizes = figure.subplots(1, 2)
            _draw_lines(times, points, lambda path: path["time_ms"] and path["time_ms"]["median"])
            _draw_lines(sizes, points, lambda path: max(path["bytes"]["counted"]) / 1e6 or None)
            times.set_ylabel("median of a call, ms")
            sizes.set_ylabel("sent by the busiest rank, MB")
            for axes in (times, sizes):
                axes.set_xlabel(unit)
                # Doublings are evenly spaced.
                axes.set_xscale("log", base=2)
                axes.set_xticks(sorted(points), [str(x) for x in sorted(points)])
                axes.set_xticks([], minor=True)
                axes.set_ylim(bottom=0)
                axes.grid(True)
            figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        drawn.append((f"Time and bytes against {what}", setting, figure))
    return drawn


def _draw_lines(axes: Axes, points: dict[int, Loaded], value: Callable[[dict[str, Any]], float | None]) -> None:
    for name, line in _lines_of(list(points.values())).items():
        paths = {x: run.result["metrics"]["paths"].get(name) for x, run in sorted(points.items())}
        values = {x: value(path) for x, path in paths.items() if path}
        found = {x: y for x, y in values.items() if y is not None}
        if found:
            look = _look_of(name)
            marker, colour = _MARKERS[look], _COLOURS[look]
            axes.plot(list(found), list(found.values()), line, color=colour, marker=marker, markersize=5, label=name)


def _look_of(path: str) -> str:
    """The key of _COLOURS that a path goes by."""
    schedule = path.split(":")[0].removesuffix("_all_to_all")
    return next((name for name in (path, schedule) if name in _COLOURS), "other")


def _lines_of(runs: list[Loaded]) -> dict[str, str]:
    """Every path of `runs`, in the order of _COLOURS, and its kind of line."""
    names = {name for run in runs for name in run.result["metrics"]["paths"]}
    looks = list(_COLOURS)
    ordered = sorted(names, key=lambda name: (looks.index(_look_of(name)), len(name), name))
    alike: Counter[str] = Counter()
    lines = {}
    for name in ordered:
        lines[name] = _LINES[alike[_look_of(name)] % len(_LINES)]
        alike[_look_of(name)] += 1
    return lines


def _schedules(runs: list[Loaded]) -> list[tuple[str, str, Figure]]:
    """For each run of several schedules, what a call takes and what the busiest rank sends under each of them."""
    drawn = []
    for run in runs:
        paths = {
            path["schedule"]: (name, path)
            for name, path in run.result["metrics"]["paths"].items()
            if path.get("schedule") and path["exchange"] == SCHEDULE_EXCHANGE
        }
        if len(paths) < 2:
            continue
        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=(10, 1.2 + 0.3 * len(paths)), layout="constrained")
            times, sizes = figure.subplots(1, 2, sharey=True)
            for row, (name, path) in enumerate(paths.values()):
                time, colour = path["time_ms"], _COLOURS[_look_of(name)]
                times.barh(row, time["median"], color=colour, height=0.7)
                times.plot([time["p10"], time["p90"]], [row, row], color=_INK, linewidth=1)
                sizes.barh(row, max(path["bytes"]["counted"]) / 1e6, color=colour, height=0.7)
            times.set_yticks(range(len(paths)), list(paths))
            times.set_ylim(len(paths) - 0.4, -0.6)
            times.set_xlabel("median of a call, ms; line: p10 to p90")
            sizes.set_xlabel("sent by the busiest rank, MB")
            for axes in (times, sizes):
                axes.set_xlim(left=0)
                axes.grid(True, axis="x")
        setting = f"{run.result['run']['label']}: {_setting(run, 'ranks')}, {run.result['hardware']['ranks']} ranks"
        drawn.append(("Schedules side by side", setting, figure))
    return drawn


def _exposed(runs: list[Loaded]) -> list[tuple[str, str, Figure]]:
    """A bar for each exchange of each run: the share of a call that the exchange adds, with p10 and p90."""
    bars = [
        (f"{run.result['run']['label']}, {run.result['hardware']['ranks']} ranks", name, path["exposed"])
        for run in runs
        if run.result["hardware"]["ranks"] > 1
        for name, path in run.result["metrics"]["paths"].items()
        if path["exposed"]
    ]
    if not bars:
        return []
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 1.2 + 0.3 * len(bars)), layout="constrained")
        axes = figure.subplots()
        for row, (_, name, exposed) in enumerate(bars):
            axes.barh(row, 100 * exposed["share"], color=_COLOURS[_look_of(name)], height=0.7)
            axes.plot([100 * exposed["p10_share"], 100 * exposed["p90_share"]], [row, row], color=_INK, linewidth=1)
        shown = [f"{_plain(label)}: {name}" for label, name, _ in bars]
        axes.set_yticks(range(len(bars)), shown)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.axvline(0, color=_INK, linewidth=0.8)
        axes.set_xlabel("share of a call that the exchange adds, %")
        axes.grid(True, axis="x")
    caption = "bar: from the medians; line: 10th to 90th percentile of the rounds. Below 0 is noise."
    return [("Exposed exchange", caption, figure)]


def _setting(run: Loaded, varied: str) -> str:
    """All that two runs must share to stand in one figure, in words."""
    workload, hardware = run.result["workload"], run.result["hardware"]
    sizes = describe_workload(workload)
    if varied == "sequence length":
        sizes = f"{hardware['ranks']} ranks, " + sizes.split(" ", 1)[1]
    return f"{workload['id']}: {sizes}, {hardware['backend']}, {hardware['cpu']}, {threads_of(hardware)}"


def _plain(text: str) -> str:
    """Matplotlib reads dollar signs as mathematics."""
    text = " ".join(text.split()).replace("$", r"\$")
    return text if len(text) <= 60 else text[:57] + "..."


def _svg(figure: Figure, number: int) -> str:
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE | {"svg.hashsalt": f"figure {number}"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # Several figures share one page, so their ids need a prefix.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{number}-", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1width="100%"', svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace(_INK, "currentColor")

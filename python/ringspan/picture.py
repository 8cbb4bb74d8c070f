"""Draws a plan for people: `python -m ringspan.picture PICTURE.json FILE.png`, started by `--plot` of the command line.

Left the mask in cells, in the colours of the ranks that hold the query rows; right what some ranks do: over time, where
a machine was given, else the pairs of each step. The numbers are those of ringspan/sim/picture.h.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
except ImportError as error:
    _NEEDED = "pictures need matplotlib; install it with: pip install matplotlib"
    if __name__ == "__main__":
        sys.exit(_NEEDED)
    raise ImportError(_NEEDED) from error

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

# Okabe and Ito's palette, told apart with every kind of colour blindness; beyond its length colours run through a map.
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F")
_SEVERAL, _NOBODY = "#A0A0A0", "#D8D8D8"
# None of the ranks' colours: these stand for what is done.
_COMPUTE, _COMPUTE_NEXT, _EXPOSED, _IDLE = "#3F4E68", "#8898B5", "#EE9C86", "#E4E4E4"
# A cell is cut into as many lines, which its owners share; a number that 2, 3, 4 and 6 divide.
_LINES = 12
_MOST_OWNERS = 8
# The faintest cell that keeps something is this strong, so that a thin band can be seen.
_FAINTEST = 0.2
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.4,
}


def draw(picture: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Draws to a file whose ending gives the format. ValueError for an ending that matplotlib does not know."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(15, 7.8), dpi=110)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
        figure.suptitle(_title(picture), fontsize=12)
        sides: Any = figure.subfigures(1, 2, width_ratios=(0.95, 1.05))
        left, right = sides
        _draw_mask(left, picture)
        if "times" in picture:
            _draw_times(right, picture)
        else:
            _draw_pairs(right, picture)
        figure.savefig(path)


def main(arguments: Sequence[str]) -> int:
    """Exit status 0, or 2 where a file cannot be read or written."""
    parser = argparse.ArgumentParser(prog="python -m ringspan.picture", description="Draws a plan.")
    parser.add_argument("picture", type=Path, metavar="PICTURE.json", help="as ringspan/sim/picture.h describes it")
    parser.add_argument("file", type=Path, metavar="FILE.png", help="to be written; the ending gives the format")
    options = parser.parse_args(arguments)
    try:
        draw(json.loads(options.picture.read_text(encoding="utf-8")), options.file)
    except (OSError, ValueError) as error:
        parser.error(f"no picture in {str(options.file)!r}: {error}")
    return 0


def _title(picture: dict[str, Any]) -> str:
    world = picture["world"]
    first = f"{picture['schedule']} over {world} rank{'' if world == 1 else 's'}"
    if "times" in picture:
        first += f" on {picture['times']['machine']}"
    more = [text for text in (picture["note"], picture["problem"]) if text]
    lines = [", ".join(more)] if sum(map(len, more)) < 140 else more
    return "\n".join(textwrap.shorten(line, 160, placeholder=" ...") for line in (first, *lines))


# The mask.


class _Ranks:
    """The colours of ranks, and what explains them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.map: Colormap = ListedColormap(_PALETTE[:world]) if world <= len(_PALETTE) else mpl.colormaps["turbo"]

    def colour(self, rank: int) -> tuple[float, float, float]:
        if self.world <= len(_PALETTE):
            return to_rgb(_PALETTE[rank])
        return to_rgb(self.map(rank / (self.world - 1)))

    def are_mixed(self, held: list[list[int]]) -> bool:
        """Whether so many ranks hold a cell that their colours would be noise; those of neighbours are all alike."""
        numbers = [rank for rank, _ in held]
        return len(held) > _MOST_OWNERS and max(numbers) - min(numbers) > self.world / _MOST_OWNERS

    def explain(self, figure: Any, axes: Axes, cells: list[tuple[list[list[int]], int]]) -> None:
        """A legend for few ranks, a bar for many, and what no rank's colour stands for. Cells: owners and size."""
        patches = []
        if any(self.are_mixed(held) for held, _ in cells):
            patches.append(Patch(color=_SEVERAL, label=f"cell with positions of more than {_MOST_OWNERS} ranks"))
        if any(sum(count for _, count in held) < size for held, size in cells):
            patches.append(Patch(color=_NOBODY, label="held by nobody"))
        if self.world <= len(_PALETTE):
            columns = 4 if patches else self.world
            patches = [Patch(color=self.colour(rank), label=f"rank {rank}") for rank in range(self.world)] + patches
            figure.legend(handles=patches, loc="outside lower center", ncols=columns)
            return
        if any(held and not self.are_mixed(held) for held, _ in cells):
            scale = ScalarMappable(Normalize(0, self.world - 1), self.map)
            bar = figure.colorbar(scale, ax=axes, location="right", fraction=0.04, pad=0.02, aspect=40)
            bar.set_label("rank that holds the position")
            bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        if patches:
            figure.legend(handles=patches, loc="outside lower center", ncols=len(patches))


def _lines_of(axis: dict[str, Any], ranks: _Ranks) -> np.ndarray:
    """[cells * _LINES, 3]: the colours of every cell's lines, shared out by its owners' positions."""
    lines = np.empty((len(axis["owners"]), _LINES, 3))
    for cell, (held, size) in enumerate(_cells(axis)):
        if ranks.are_mixed(held):
            lines[cell] = to_rgb(_SEVERAL)
            continue
        ends = np.cumsum([count for _, count in held]) / size
        for line in range(_LINES):
            owner = int(np.searchsorted(ends, (line + 0.5) / _LINES, side="right"))
            lines[cell, line] = ranks.colour(held[owner][0]) if owner < len(held) else to_rgb(_NOBODY)
    return lines.reshape(-1, 3)


def _cells(axis: dict[str, Any]) -> list[tuple[list[list[int]], int]]:
    """Owners and size of every cell."""
    return list(zip(axis["owners"], np.diff(axis["begins"]), strict=True))


def _draw_mask(figure: Any, picture: dict[str, Any]) -> None:
    mask, ranks = picture["mask"], _Ranks(picture["world"])
    q_sizes, kv_sizes = np.diff(mask["q"]["begins"]), np.diff(mask["kv"]["begins"])
    share = np.array(mask["kept"], dtype=float).reshape(len(q_sizes), len(kv_sizes))
    share = share / np.outer(q_sizes, kv_sizes)
    q_lines, kv_lines = _lines_of(mask["q"], ranks), _lines_of(mask["kv"], ranks)
    strength = np.repeat(np.where(share > 0, _FAINTEST + (1 - _FAINTEST) * share, 0), _LINES, axis=0)[..., None]
    q_len, kv_len = mask["q"]["begins"][-1], mask["kv"]["begins"][-1]

    grid = figure.subplots()
    extent = (0, max(1, kv_len), max(1, q_len), 0)
    top, side = grid.inset_axes((0, 1.012, 1, 0.03)), grid.inset_axes((-0.042, 0, 0.03, 1))
    images = ((grid, 1 - strength * (1 - q_lines[:, None, :])), (top, kv_lines[None]), (side, q_lines[:, None]))
    for axes, image in images:
        if image.size:
            axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
        axes.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color="#606060", linewidth=0.6)
    for ticks in (grid.xaxis, side.yaxis):
        ticks.set_major_locator(MaxNLocator(6, integer=True))
        ticks.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    grid.set_xlabel("key position")
    side.set_ylabel("query position")
    entry = "" if picture["batch"] is None else f", batch entry {picture['batch']}"
    kept = 100 * np.sum(mask["kept"]) / max(1, q_len * kv_len)
    figure.suptitle(
        f"Mask{entry}: {kept:.{1 if kept >= 1 else 3}f} % of all pairs kept. Colour: rank that holds the query rows, "
        "strength: kept\nshare of a cell. Strips: ranks that hold the keys (top) and the queries (left)",
        fontsize=10,
    )
    ranks.explain(figure, grid, _cells(mask["q"]) + _cells(mask["kv"]))


# What the ranks do.


def _draw_times(figure: Any, picture: dict[str, Any]) -> None:
    times = picture["times"]
    passes = [times["forward"], times["backward"]]
    longest = max(part["end"] for part in passes)
    unit, scale = _unit_of(longest)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, name, part in zip(panels, ("Forward", "Backward"), passes, strict=True):
        last = part["end"]
        for row, rank in enumerate(part["ranks"]):
            _draw_rank(axes, row, rank, last, scale)
        fixed = part["seconds"] - last
        more = f" with the call's fixed {fixed * scale:.3g} {unit}, not drawn" if fixed > 1e-3 * part["seconds"] else ""
        axes.set_title(f"{name}: {part['seconds'] * scale:.4g} {unit}{more}", loc="left")
        _label_ranks(axes, picture)
    panels[1].set_xlabel(f"time since the pass began, {unit}")
    panels[1].set_xlim(0, longest * scale * 1.01 if longest > 0 else 1)
    handles = [
        Patch(color=_COMPUTE, label="computes (shades: steps in turn)"),
        Patch(color=_EXPOSED, label="waits for messages, or copies"),
        Patch(color=_IDLE, label="is done before the last rank"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _draw_rank(axes: Axes, row: int, rank: dict[str, Any], last: float, scale: float) -> None:
    spans: dict[str, list[tuple[float, float]]] = {colour: [] for colour in (_COMPUTE, _COMPUTE_NEXT, _EXPOSED, _IDLE)}
    done = 0.0
    for number, step in enumerate(rank["steps"]):
        begin, end = step["compute_begin"], step["compute_end"]
        spans[_EXPOSED].append((done, begin))
        spans[_COMPUTE if number % 2 == 0 else _COMPUTE_NEXT].append((begin, end))
        done = end
    spans[_EXPOSED].append((done, rank["end"]))
    spans[_IDLE].append((rank["end"], last))
    for colour, parts in spans.items():
        boxes = [
            [(x * scale, row + y) for x, y in ((begin, -0.4), (end, -0.4), (end, 0.4), (begin, 0.4))]
            for begin, end in parts
            if end > begin
        ]
        axes.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors="none"), autolim=False)


def _draw_pairs(figure: Any, picture: dict[str, Any]) -> None:
    axes = figure.subplots()
    pairs = picture["pairs"]
    num_steps = max((len(steps) for steps in pairs), default=0)
    table = np.zeros((len(pairs), num_steps))
    for row, steps in enumerate(pairs):
        table[row, : len(steps)] = steps
    colours = ListedColormap(mpl.colormaps["viridis"](np.linspace(0.1, 0.95, max(1, num_steps))))
    begin = np.zeros(len(pairs))
    edge = "white" if num_steps <= 16 else "none"
    for step in range(num_steps):
        axes.barh(np.arange(len(pairs)), table[:, step], left=begin, height=0.8, color=colours(step), edgecolor=edge)
        begin += table[:, step]
    title = "Work: kept pairs per rank and step of the forward pass"
    if begin.size and begin.max() > 0:
        axes.axvline(begin.mean(), color="black", linestyle="--", linewidth=1)
        title += f"\nThe busiest of these ranks has {begin.max() / begin.mean():.3f} times their mean (dashed)"
    axes.set_title(title, loc="left")
    axes.set_xlabel("kept pairs, of all batch entries and of the heads that the rank computes")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    _label_ranks(axes, picture)
    axes.set_xlim(0, max(1.0, begin.max() if begin.size else 1.0) * 1.02)
    if num_steps <= 8:
        handles = [Patch(color=colours(step), label=f"step {step}") for step in range(num_steps)]
        figure.legend(handles=handles, loc="outside lower center", ncols=max(1, num_steps))
    else:
        norm = BoundaryNorm(np.arange(num_steps + 1) - 0.5, colours.N)
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, fraction=0.04, pad=0.02, aspect=40)
        bar.set_label("step")
        bar.set_ticks(sorted({*range(0, num_steps, max(1, num_steps // 8))}))
        bar.minorticks_off()


def _label_ranks(axes: Axes, picture: dict[str, Any]) -> None:
    ranks = picture["ranks"]
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    # At most 16 labels: more would run into each other.
    every = -(-len(ranks) // 16)
    rows = range(0, len(ranks), every)
    axes.set_yticks(list(rows), [str(ranks[row]) for row in rows])
    axes.tick_params(axis="y", length=0)
    some = "" if len(ranks) == picture["world"] else f" ({len(ranks)} of {picture['world']})"
    axes.set_ylabel(f"rank{some}")


def _unit_of(seconds: float) -> tuple[str, float]:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return unit, scale
    return "us", 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

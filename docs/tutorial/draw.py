"""Draws the tutorial's pictures from the project's own numbers: `python docs/tutorial/draw.py [--out FOLDER]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from ringspan.mechanism import estimate_ring_kv_communication, local_softmax_statistics, merge_softmax_statistics

import ringspan as rs

# Okabe and Ito's palette, told apart with every kind of colour blindness; the rank's number stands in each box too.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
RANK_INK = ("white", "black", "white", "black")
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
MAPS = ("contiguous", "head_tail", "striped")
# The example of the pages on softmax: one query, four keys, two parts.
EXPONENTIALS = (1, 1, 4, 2)
SCORES = torch.tensor([EXPONENTIALS]).log()
VALUES = torch.tensor([[8.0], [16.0], [24.0], [32.0]])


def shard_map(name: str, seq_len: int, world: int) -> rs.ShardMap:
    """The map of that name."""
    return getattr(rs.ShardMap, name)(seq_len, world)


def owners(smap: rs.ShardMap) -> list[int]:
    """For each position the rank that holds it."""
    owner = [0] * smap.seq_len
    for rank in range(smap.world_size):
        for position in smap.positions(rank).tolist():
            owner[position] = rank
    return owner


def box(axes: Axes, x: float, y: float, rank: int, text: str, width: float = 1.0) -> None:
    """One box in the colour of a rank."""
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=RANK_COLOURS[rank], edgecolor="white", linewidth=2))
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", color=RANK_INK[rank], fontsize=11)


def bare(axes: Axes, width: float, height: float) -> None:
    """Boxes only: no frame, no ticks, first row on top."""
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.set_frame_on(False)


def split() -> Figure:
    """Twelve positions on three ranks, three ways."""
    figure, axes = plt.subplots(figsize=(9, 3.4))
    bare(axes, 15, 4.4)
    for row, name in enumerate(MAPS):
        axes.text(2.7, 0.5 + 1.3 * row, name, ha="right", va="center", fontsize=12, family="monospace")
        for position, rank in enumerate(owners(shard_map(name, 12, 3))):
            box(axes, 3 + position, 1.3 * row, rank, str(rank))
    for position in range(12):
        axes.text(3.5 + position, 3.9, str(position), ha="center", va="center", fontsize=10)
    axes.text(2.7, 3.9, "position", ha="right", va="center", fontsize=11)
    axes.set_title("Which rank holds which position (12 positions, 3 ranks)")
    return figure


def averaging() -> Figure:
    """The weight of each key: in one softmax, and where two partial ones are averaged."""
    true = torch.softmax(SCORES, -1)[0]
    averaged = torch.cat([torch.softmax(part, -1)[0] / 2 for part in SCORES.split(2, -1)])
    figure, axes = plt.subplots(figsize=(8, 3.8))
    places = torch.arange(4)
    for shift, weights, colour, hatch, label in (
        (-0.2, true, BLUE, "", f"one softmax: output {(true @ VALUES).item():.2f}"),
        (0.2, averaged, ORANGE, "//", f"average of two: output {(averaged @ VALUES).item():.2f}"),
    ):
        bars = axes.bar(places + shift, weights, 0.36, color=colour, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(bars, fmt="%.3f", fontsize=10)
    axes.axvline(1.5, color=GREY, linestyle="--")
    names = [f"key {key}\nexp(score) {EXPONENTIALS[key]}, value {VALUES[key].item():g}" for key in range(4)]
    axes.set_xticks(places, names)
    axes.set(ylabel="weight of the key", ylim=(0, 0.75))
    axes.set_title("Averaging gives every part the same say (left: part 0, right: part 1)", pad=10)
    axes.legend(loc="upper left")
    return figure


def merge() -> Figure:
    """The statistics of one query after each of four keys: the sums change their unit where the maximum grows."""
    running, rows = None, []
    for key in range(4):
        part = local_softmax_statistics(SCORES[:, key : key + 1], VALUES[key : key + 1])
        running = merge_softmax_statistics(running, part)
        rows.append([tensor.item() for tensor in running])
    maximum, denominator, numerator = (list(column) for column in zip(*rows, strict=True))
    output = [top / below for top, below in zip(numerator, denominator, strict=True)]
    figure, panels = plt.subplots(1, 4, figsize=(11, 3.2))
    for axes, (title, values) in zip(
        panels,
        (
            ("maximum m", maximum),
            ("denominator l", denominator),
            ("numerator o", numerator),
            ("o / l", output),
        ),
        strict=True,
    ):
        bars = axes.bar(range(1, 5), values, 0.7, color=GREEN if title == "o / l" else BLUE)
        axes.bar_label(bars, fmt="%.3g", fontsize=10)
        axes.set(title=title, xlabel="keys seen", xticks=range(1, 5), ylim=(0, 1.2 * max(values)))
    figure.suptitle("One query, key by key: the third has the largest score, so what was summed before is divided by 4")
    return figure


def ring() -> Figure:
    """Whose K/V each rank works on in each step, from the plan."""
    world = 4
    shape = (1, 1, 64, 8)
    plan = rs.plan(shape, shape, shape, world_size=world)
    figure, axes = plt.subplots(figsize=(9, 4))
    bare(axes, 11.6, 6)
    for rank in range(world):
        axes.text(1.5, 1.6 + 1.15 * rank, f"rank {rank}", ha="right", va="center", fontsize=12)
        for step in plan.rank(rank).forward:
            x = 1.8 + 2.5 * step["step"]
            box(axes, x, 1.1 + 1.15 * rank, step["kv"]["owner"], f"KV of {step['kv']['owner']}", 1.6)
            if step["before"]:
                axes.annotate(
                    "",
                    (x + 2.5, 1.6 + 1.15 * ((rank + 1) % world)),
                    (x + 1.6, 1.6 + 1.15 * rank),
                    arrowprops={"arrowstyle": "->", "color": "#444444", "linewidth": 1.2},
                )
    for step in range(world):
        axes.text(2.6 + 2.5 * step, 0.7, f"step {step}", ha="center", va="center", fontsize=12)
    axes.set_title("Four ranks: each passes on what it works on, three times")
    return figure


def ledger() -> Figure:
    """What grows with the number of ranks, and what shrinks."""
    ranks = [1, 2, 4, 8, 16, 32, 64]
    rows = [estimate_ring_kv_communication(65536, 1024, 2, world) for world in ranks]
    figure, panels = plt.subplots(1, 4, figsize=(12, 3.2))
    for axes, (title, name, unit, colour) in zip(
        panels,
        (
            ("positions per rank", "local_sequence_length", 1, GREEN),
            ("MiB per round", "payload_per_round_bytes", 2**20, GREEN),
            ("rounds", "rounds", 1, ORANGE),
            ("MiB sent per rank, total", "total_payload_per_rank_bytes", 2**20, ORANGE),
        ),
        strict=True,
    ):
        axes.plot([str(world) for world in ranks], [row[name] / unit for row in rows], color=colour, marker="o")
        axes.set(title=title, xlabel="ranks", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.suptitle("65536 positions, 1024 numbers of 2 bytes each for K and for V: two things shrink, two grow")
    return figure


def balance() -> Figure:
    """A causal mask by the rank that computes each pair, and the pairs per rank."""
    seq_len, world = 16, 4
    figure, panels = plt.subplots(2, 3, figsize=(10, 6), height_ratios=(3, 2))
    colours = mpl.colors.ListedColormap(["white", *RANK_COLOURS])
    for column, name in enumerate(MAPS):
        smap = shard_map(name, seq_len, world)
        owner = owners(smap)
        grid = [[owner[i] + 1 if j <= i else 0 for j in range(seq_len)] for i in range(seq_len)]
        axes = panels[0][column]
        axes.imshow(grid, cmap=colours, vmin=0, vmax=world, interpolation="nearest")
        axes.set(title=name, xlabel="key", ylabel="query", xticks=range(0, seq_len, 4), yticks=range(0, seq_len, 4))
        axes.set_xticks([place - 0.5 for place in range(seq_len)], minor=True)
        axes.set_yticks([place - 0.5 for place in range(seq_len)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)
        axes = panels[1][column]
        bars = axes.bar(range(world), smap.work(rs.causal()), color=RANK_COLOURS)
        axes.bar_label(bars, fontsize=10)
        axes.set(xlabel="rank", ylabel="kept pairs", ylim=(0, 68), xticks=range(world))
    figure.suptitle("Causal mask, 16 positions, 4 ranks: who computes which pairs, and how many")
    return figure


PICTURES: tuple[Callable[[], Figure], ...] = (split, averaging, merge, ring, ledger, balance)


def main() -> None:
    """Writes one PNG for each picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures", help="folder for the PNGs")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        figure = picture()
        figure.tight_layout()
        figure.savefig(folder / f"{picture.__name__}.png", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()

"""Rows decode/...: one new token against a long cache. Nothing is computed twice, so reading K and V is the limit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import peak
import torch
from reference import distance_to, judge
from ringspan.bench.clock import Clock
from settings import Settings, run_each
from shapes import DTYPES, decode_target
from turns import first_calls, shortest_in_turns

import ringspan as rs

_KEYS = 16384
_HEAD_DIM = 128


def names(settings: Settings) -> list[str]:
    """All rows."""
    return list(_rows(settings))


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Times and checks each selected row."""
    return run_each(_rows(settings), selected, _run_row, settings)


def _rows(settings: Settings) -> dict[str, tuple[str, int, int]]:
    return {
        f"decode/{dtype}/H{heads}/T{threads}": (dtype, heads, threads)
        for dtype, heads, threads in itertools.product(("fp32", "bf16"), (8, 1), settings.threads)
    }


def _run_row(dtype: str, heads: int, threads: int, settings: Settings) -> dict[str, Any]:
    torch.set_num_threads(threads)
    num_keys = 512 if settings.quick else _KEYS
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 1, _HEAD_DIM, generator=generator).to(DTYPES[dtype])
    key, value = torch.randn(2, 1, heads, num_keys, _HEAD_DIM, generator=generator).to(DTYPES[dtype])
    reads: list[float] = []
    sides = {
        "ours": lambda: rs.attention(query, key, value),
        "pytorch": lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0],
    }
    scores = query.double() @ key.double().transpose(-1, -2) * _HEAD_DIM**-0.5
    expected = scores.softmax(-1) @ value.double()
    clock = Clock()
    results, first = first_calls(clock, sides)
    distances = {name: distance_to((expected,), (found,)) for name, found in results.items()}
    sides["peak"] = lambda: reads.append(peak.read_bytes_per_second(threads))
    seconds = shortest_in_turns(clock, sides, first, settings.budget_s)
    target = decode_target(dtype)
    read_bytes = key.nbytes + value.nbytes
    ratio = seconds["pytorch"] / seconds["ours"]
    share = read_bytes / seconds["ours"] / max(reads)
    return {
        "threads": threads,
        "milliseconds": {name: seconds[name] * 1e3 for name in distances},
        "gigabytes_per_second": read_bytes / seconds["ours"] / 1e9,
        "peak_gigabytes_per_second": max(reads) / 1e9,
        "goals": [
            {"name": "ratio", "what": "x PyTorch", "value": ratio, "at_least": target.ratio},
            {"name": "share_of_peak", "what": "of memory peak", "value": share, "at_least": target.share},
        ],
        "errors": {name: vars(distance) for name, distance in distances.items()},
        "wrong": judge(dtype, False, distances["ours"], distances["pytorch"]),
    }

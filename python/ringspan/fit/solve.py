"""From what was measured to a machine description."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Node:
    """What is known of a node without measuring. memory_bytes: of a rank, 0 = unknown.

    waits_for_all: whether an all_to_all ends for every rank at the same time.
    """

    ranks: int
    processors: int
    memory_bytes: int
    waits_for_all: bool


def solve(results: Iterable[dict[str, Any]], *, name: str, source: str, node: Node) -> dict[str, Any]:
    """The fields of a `Machine`. Links that were not measured are taken to be as the others."""
    results = list(results)
    links = _links(results)
    fixed = _fixed_costs(results, next(iter(links.values()))["latency_seconds"])
    copy = next(r for r in results if r["kind"] == "copy")
    return {
        "name": name,
        "source": source,
        "ranks_per_node": node.ranks,
        "processors_per_node": node.processors,
        "memory_bytes": node.memory_bytes,
        "node": links.get("node", links.get("network")),
        "network": links.get("network", links.get("node")),
        "overlap": _overlap(next(r for r in results if r["kind"] == "overlap")),
        "all_to_all_waits_for_all": node.waits_for_all,
        "copy_bytes_per_second": copy["bytes"] / copy["seconds"],
        **fixed,
        "kernels": _kernels(results, fixed),
    }


def fit_two(rows: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """a, b >= 0 with a x + b y near the seconds, by least squares of the relative errors."""
    scaled = torch.tensor([[x / t, y / t] for (x, y), t in zip(rows, seconds, strict=True)], dtype=torch.float64)
    ones = torch.ones(len(rows), dtype=torch.float64)
    a, b = torch.linalg.lstsq(scaled, ones.unsqueeze(1)).solution.squeeze(1).tolist()
    if b < 0:
        return ((scaled[:, 0] @ ones) / (scaled[:, 0] @ scaled[:, 0])).item(), 0.0
    if a < 0:
        return 0.0, ((scaled[:, 1] @ ones) / (scaled[:, 1] @ scaled[:, 1])).item()
    return a, b


def _links(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    links = {}
    for name in ("node", "network"):
        measured = [r for r in results if r["kind"] == "link" and r["class"] == name]
        if measured:
            latency, per_byte = fit_two([(1.0, r["bytes"]) for r in measured], [r["seconds"] for r in measured])
            links[name] = {"latency_seconds": latency, "bytes_per_second": 1 / max(per_byte, 1e-15)}
    # One rank alone sends nothing; the simulator wants a figure all the same.
    return links or {"node": {"latency_seconds": 0.0, "bytes_per_second": 1e9}}


def _overlap(result: dict[str, Any]) -> float:
    met = min(result["compute"], result["message"])
    longer = result["together"] - max(result["compute"], result["message"])
    return min(1.0, max(0.0, 1 - longer / met))


def _fixed_costs(results: list[dict[str, Any]], latency: float) -> dict[str, float]:
    """A step costs half of what a call of one step costs alone; the rest of a call over ranks is the call's."""
    calls = next(r for r in results if r["kind"] == "calls")
    step = min(calls["alone"]) / 2
    forward, backward = calls.get("ring", calls["alone"])
    steps = calls.get("world", 1)
    hops = steps - 1
    return {
        "forward_call_seconds": max(0.0, forward - steps * step - hops * latency),
        "backward_call_seconds": max(0.0, backward - steps * step - (2 * hops + 1 if hops else 0) * latency),
        "step_seconds": step,
    }


def _kernels(results: list[dict[str, Any]], fixed: dict[str, float]) -> list[dict[str, Any]]:
    kernels = []
    measured = [r for r in results if r["kind"] == "kernel"]
    calls = next(r for r in results if r["kind"] == "calls")["alone"]
    for dtype, head_dim in dict.fromkeys((r["dtype"], r["head_dim"]) for r in measured):
        own = [r for r in measured if (r["dtype"], r["head_dim"]) == (dtype, head_dim)]
        kernel: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim}
        for direction, overhead in zip(("forward", "backward"), calls, strict=True):
            seconds = [max(r[direction]["seconds"] - overhead, 1e-9) for r in own]
            per_flop, per_row = fit_two([(r[direction]["flops"], r["rows"]) for r in own], seconds)
            kernel[f"{direction}_flops_per_second"] = 1 / max(per_flop, 1e-18)
            kernel[f"{direction}_row_seconds"] = per_row
        kernels.append(kernel)
    return kernels

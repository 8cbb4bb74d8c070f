"""Rows cost/...: what a call costs beside its arithmetic. Nothing to compare with; the numbers are reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from settings import Settings

import ringspan as rs

_HEADS, _HEAD_DIM, _TOKENS_PER_RANK = 8, 128, 16384


def names(settings: Settings) -> list[str]:
    """All rows."""
    worlds = (8,) if settings.quick else (8, 64, 1024)
    plans = [f"cost/plan/{mask}/W{world}" for mask in ("causal", "documents") for world in worlds]
    return ["cost/small_call/forward", "cost/small_call/forward_backward", *plans]


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """The median time of each selected row."""
    for name in selected:
        repeats = 5 if settings.quick else 51
        result = _run_plan(name, repeats) if name.startswith("cost/plan/") else _run_small_call(name, repeats)
        yield {"name": name, "threads": 1, "wrong": None, **result}


def _run_small_call(name: str, repeats: int) -> dict[str, Any]:
    """One token, one head: only the way through Python, the dispatcher and autograd remains."""
    torch.set_num_threads(1)
    backward = name.endswith("backward")
    q, k, v = (x.requires_grad_(backward) for x in torch.randn(3, 1, 1, 1, 64).unbind())

    def through(attend: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        def call() -> Any:
            out = attend(q, k, v)
            return torch.autograd.grad(out, (q, k, v), out.detach()) if backward else out

        return call

    sides = {"ours": through(rs.attention), "pytorch": through(torch.nn.functional.scaled_dot_product_attention)}
    medians = {side: _median_ms(call, 20 * repeats) for side, call in sides.items()}
    return {
        "milliseconds": medians,
        "goals": [{"name": "call_us", "what": "us", "value": medians["ours"] * 1e3}],
    }


def _run_plan(name: str, repeats: int) -> dict[str, Any]:
    """One rank's part of a plan: what each rank builds when a call is new to it."""
    _, _, kind, world_text = name.split("/")
    world = int(world_text[1:])
    seq_len = _TOKENS_PER_RANK * world
    sizes = (1, _HEADS, seq_len, _HEAD_DIM)
    mask = rs.causal() if kind == "causal" else rs.documents(lengths=[_TOKENS_PER_RANK // 4] * (4 * world))
    smap = rs.ShardMap.head_tail(seq_len, world)

    def build() -> object:
        return rs.plan(sizes, sizes, sizes, mask=mask, shard_map=smap).sent_bytes(world // 2)

    median = _median_ms(build, repeats if world < 1024 else min(repeats, 3))
    return {
        "milliseconds": {"plan": median},
        "goals": [{"name": "plan_ms", "what": "ms for one rank", "value": median}],
    }


def _median_ms(run: Callable[[], Any], repeats: int) -> float:
    run()
    spans = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        spans.append(time.perf_counter() - begin)
    return sorted(spans)[repeats // 2] * 1e3

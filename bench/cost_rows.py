"""Rows cost/...: what a call costs beside its arithmetic.

Small calls and plans have nothing to be held against; DTensors and SDPA are held against the plain op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import peak
import torch
import torch.distributed as dist
from ringspan.bench.clock import Clock
from settings import Settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from turns import first_calls, median_of, shortest_in_turns

import ringspan as rs

_HEADS, _HEAD_DIM, _TOKENS_PER_RANK = 8, 128, 16384
_MOST_US = 150.0  # of a front above the plain op, for each call: a backward is one too
_MOST_PLAN_SHARE = 0.01  # of the call that a plan serves
_SHARE_TOKENS = 1024  # a rank: few, so that the call is short
_BUDGET_S = 3.0
# What a call goes through, over which op on plain tensors.
_FRONTS = ("dtensor/attention", "dtensor/contract", "sdpa")


def names(settings: Settings) -> list[str]:
    """All rows."""
    worlds = (8,) if settings.quick else (8, 64, 1024)
    plans = [f"cost/plan/{mask}/W{world}" for mask in ("causal", "documents") for world in worlds]
    shares = (2,) if settings.quick else (8, 64)
    plans += [f"cost/plan_share/{mask}/W{world}" for mask in ("causal", "documents") for world in shares]
    fronts = [f"cost/{front}/{direction}" for front in _FRONTS for direction in ("forward", "forward_backward")]
    return ["cost/small_call/forward", "cost/small_call/forward_backward", *fronts, *plans]


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """The median time of each selected row; of fronts the shortest."""
    for name in selected:
        repeats = 5 if settings.quick else 51
        family = name.split("/")[1]
        runners = {"plan": _run_plan, "plan_share": _run_plan_share, "small_call": _run_small_call}
        result = runners.get(family, _run_front)(name, repeats)
        yield {"name": name, "threads": 1, "wrong": None, **result}


def _run_small_call(name: str, repeats: int) -> dict[str, Any]:
    """One token, one head: only the way through Python, the dispatcher and autograd remains."""
    torch.set_num_threads(1)
    backward = name.endswith("backward")
    q, k, v = (x.requires_grad_(backward) for x in torch.randn(3, 1, 1, 1, 64).unbind())

    sides = {"ours": rs.attention, "pytorch": torch.nn.functional.scaled_dot_product_attention}
    medians = {
        side: median_of(Clock(), _through(call, (q, k, v), backward), 20 * repeats) * 1e3
        for side, call in sides.items()
    }
    return {
        "milliseconds": medians,
        "goals": [{"name": "call_us", "what": "us", "value": medians["ours"] * 1e3}],
    }


def _run_front(name: str, repeats: int) -> dict[str, Any]:
    """One token on a mesh of one rank that shares out the sequence, over the same op on plain tensors."""
    torch.set_num_threads(1)
    _, *front, direction = name.split("/")
    backward = direction == "forward_backward"
    plain = [x.requires_grad_(backward) for x in torch.randn(3, 1, 1, 1, 64).unbind()]
    with _mesh_of_one() as mesh:
        placed = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_(backward) for x in plain]

        def contract(q: Any, k: Any, v: Any) -> Any:
            return torch.ops.ringspan.fusion_attention_v3(q, k, v, 1, "BNSD")[0]

        def sdpa(q: Any, k: Any, v: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        calls = {
            "dtensor/attention": (placed, rs.attention),
            "dtensor/contract": (placed, contract),
            "sdpa": (plain, sdpa),
        }
        leaves, call = calls["/".join(front)]
        base = contract if call is contract else rs.attention
        with rs.sdpa():
            sides = {"plain": _through(base, plain, backward), "front": _through(call, leaves, backward)}
            shortest = _shortest_ms(sides, 40 * repeats)
    above, calls_made = (shortest["front"] - shortest["plain"]) * 1e3, 2 if backward else 1
    what = f"us above the plain op in {calls_made} call" + "s" * (calls_made - 1)
    return {
        "milliseconds": shortest,
        "goals": [{"name": "above_us", "what": what, "at_most": _MOST_US * calls_made, "value": above}],
    }


def _through(attend: Callable[..., Any], leaves: Sequence[Any], backward: bool) -> Callable[[], Any]:
    upstream = attend(*leaves).detach()

    def call() -> Any:
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, upstream) if backward else out

    return call


@contextlib.contextmanager
def _mesh_of_one() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def _run_plan(name: str, repeats: int) -> dict[str, Any]:
    """One rank's part of a plan, counted by the ledger and read by Python."""
    _, _, kind, world_text = name.split("/")
    world = int(world_text[1:])
    seq_len = _TOKENS_PER_RANK * world
    sizes = (1, _HEADS, seq_len, _HEAD_DIM)
    mask = rs.causal() if kind == "causal" else rs.documents(lengths=[_TOKENS_PER_RANK // 4] * (4 * world))
    smap = rs.ShardMap.head_tail(seq_len, world)

    def build() -> object:
        return rs.plan(sizes, sizes, sizes, mask=mask, shard_map=smap).sent_bytes(world // 2)

    median = median_of(Clock(), build, repeats if world < 1024 else min(repeats, 3)) * 1e3
    return {
        "milliseconds": {"plan": median},
        "goals": [{"name": "plan_ms", "what": "ms for one rank", "value": median}],
    }


def _run_plan_share(name: str, repeats: int) -> dict[str, Any]:
    """One rank's part of a plan over that rank's arithmetic in forward alone: with exchange the share is smaller."""
    torch.set_num_threads(1)
    _, _, kind, world_text = name.split("/")
    world = int(world_text[1:])
    seq_len, document = _SHARE_TOKENS * world, 0 if kind == "causal" else 2 * _SHARE_TOKENS
    mask = rs.documents(lengths=[document] * (seq_len // document)) if document else rs.causal()
    rank, smap = world // 2, rs.ShardMap.head_tail(seq_len, world)
    own = rs.ShardMap.from_segments([smap.segments(rank)], seq_len=seq_len, local_rows=[smap.local_rows(rank)])
    whole = rs.ShardMap.contiguous(seq_len, 1)
    q = torch.randn(1, _HEADS, smap.local_rows(rank), _HEAD_DIM)
    k, v = torch.randn(2, 1, _HEADS, seq_len, _HEAD_DIM).unbind()

    def call() -> Any:
        return rs.attention(q, k, v, mask=mask, shard_map=own, kv_shard_map=whole)

    plan_s = peak.load_library().ringspan_plan_seconds(world, _SHARE_TOKENS, document, _HEADS, _HEAD_DIM, repeats)
    medians = {"plan": plan_s * 1e3, "call": median_of(Clock(), call, min(repeats, 5)) * 1e3}
    share = medians["plan"] / medians["call"]
    return {
        "milliseconds": medians,
        "goals": [{"name": "plan_share", "what": "of the call", "at_most": _MOST_PLAN_SHARE, "value": share}],
    }


def _shortest_ms(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Of each side, in turns. A difference of two calls this short drowns in what else the machine does."""
    clock = Clock()
    shortest = shortest_in_turns(clock, sides, first_calls(clock, sides)[1], _BUDGET_S, rounds)
    return {side: seconds * 1e3 for side, seconds in shortest.items()}

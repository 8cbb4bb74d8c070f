"""Rows pairs/...: what masks, biases, dropout and layouts cost, fp32, each beside what it is to be held against.

skip/MASK       time per kept pair, over that of the causal kernel at the same length
dropout         over the same call without dropout
dense/KIND      a boolean mask as a tensor: PyTorch's attention with the same mask, over ours
bias            a float mask likewise
tnd             packed documents of one length in layout TND, over the same as a batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ringspan.bench.clock import Clock, Side
from settings import Settings
from shapes import HEADS
from torch import Tensor
from turns import first_calls, shortest_in_turns

import ringspan as rs

_CLOSE = 2e-5  # of the largest value: two ways to the same answer in fp32
_sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Pair:
    """Two calls of the same leaves, ours and what it is held against; results are compared where `same`.

    `weight`: what the quotient of the times is multiplied with, kept pairs of the other over ours.
    """

    leaves: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    other: Callable[..., Tensor]
    same: bool = True
    weight: float = 1.0


def names(settings: Settings) -> list[str]:
    """All rows."""
    return list(_rows(settings))


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Times and checks each selected row."""
    rows = _rows(settings)
    for name in selected:
        pair, backward, threads, goal = rows[name]
        yield {"name": name, **_run_row(pair(), backward, threads, goal, settings)}


def _rows(settings: Settings) -> dict[str, tuple]:
    long, short = (512, 256) if settings.quick else (8192, 2048)
    found = {}
    for backward in (False, True):
        direction = "backward" if backward else "forward"
        for threads in settings.threads:
            tail = f"T{threads}"
            slower = {"name": "slowdown", "what": "x the causal kernel per pair", "at_most": 1.15}
            for mask in ("window", "documents"):
                found[f"pairs/skip/{mask}/{direction}/S{long}/D64/{tail}"] = (
                    (lambda mask=mask: _skip(mask, long)), backward, threads, slower,
                )  # fmt: skip
            for dim in (64, 128):
                dropped = {"name": "slowdown", "what": "x no dropout", "at_most": 1.35}
                found[f"pairs/dropout/{direction}/S{short}/D{dim}/{tail}"] = (
                    (lambda dim=dim: _dropout(short, dim)), backward, threads, dropped,
                )  # fmt: skip
                faster = {"name": "ratio", "what": "x PyTorch with the same mask", "at_least": 2.0}
                for kind in ("causal", "documents", "random"):
                    found[f"pairs/dense/{kind}/{direction}/S{short}/D{dim}/{tail}"] = (
                        (lambda kind=kind, dim=dim: _dense(kind, short, dim)), backward, threads, faster,
                    )  # fmt: skip
                found[f"pairs/bias/{direction}/S{short}/D{dim}/{tail}"] = (
                    (lambda dim=dim: _bias(short, dim)), backward, threads, faster | {"at_least": 1.0},
                )  # fmt: skip
            packed = {"name": "slowdown", "what": "x the same as a batch", "at_most": 1.05}
            found[f"pairs/tnd/{direction}/S{short}/D64/{tail}"] = (
                (lambda: _packed(short)), backward, threads, packed,
            )  # fmt: skip
    return found


def _run_row(pair: Pair, backward: bool, threads: int, goal: dict[str, Any], settings: Settings) -> dict[str, Any]:
    torch.set_num_threads(threads)
    sides: dict[str, Side] = {
        name: (lambda call=call: (call(*pair.leaves),)) for name, call in (("ours", pair.ours), ("other", pair.other))
    }
    if backward:
        leaves = [leaf.requires_grad_() for leaf in pair.leaves]
        outs = {name: side()[0] for name, side in sides.items()}
        dout = torch.randn(outs["ours"].shape, generator=torch.Generator().manual_seed(1))
        sides = {
            name: (lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True))
            for name, out in outs.items()
        }
    clock = Clock()
    results, first = first_calls(clock, sides)
    error = max(
        float((one.detach() - other.detach()).abs().max() / other.detach().abs().max().clamp(min=1e-9))
        for one, other in zip(results["ours"], results["other"], strict=True)
    )
    seconds = shortest_in_turns(clock, sides, first, settings.budget_s)
    slowdown = seconds["ours"] / seconds["other"] * pair.weight
    value = slowdown if goal["name"] == "slowdown" else 1 / slowdown
    limit = _CLOSE * (5 if backward else 1)
    wrong = f"the two differ by {error:.2g} of the largest value" if pair.same and not error <= limit else None
    return {
        "threads": threads,
        "milliseconds": {name: value * 1e3 for name, value in seconds.items()},
        "goals": [goal | {"value": value}],
        "errors": {"between": error if pair.same else None},
        "wrong": wrong,
    }


def _draw(*shape: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).unbind())


def _skip(mask: str, seq_len: int) -> Pair:
    """Both answers are right by the tests; here only their times per kept pair are compared."""
    window = min(512, seq_len // 4)
    length = seq_len // 32
    if mask == "window":
        rule, pairs = rs.window(window), sum(min(i, window) + 1 for i in range(seq_len))
    else:
        rule, pairs = rs.documents(lengths=[length] * 32), 32 * length * (length + 1) // 2
    causal = seq_len * (seq_len + 1) // 2
    leaves = _draw(1, HEADS, seq_len, 64)
    return Pair(
        leaves,
        lambda q, k, v: rs.attention(q, k, v, mask=rule),
        lambda q, k, v: rs.attention(q, k, v, mask=rs.causal()),
        same=False,
        weight=causal / pairs,
    )


def _dropout(seq_len: int, dim: int) -> Pair:
    return Pair(
        _draw(1, HEADS, seq_len, dim),
        lambda q, k, v: rs.attention(q, k, v, dropout_p=0.1, seed=1),
        lambda q, k, v: rs.attention(q, k, v),
        same=False,
    )


def _dense(kind: str, seq_len: int, dim: int) -> Pair:
    keep = torch.rand(seq_len, seq_len, generator=torch.Generator().manual_seed(2)) > 0.3
    if kind == "causal":
        keep = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    elif kind == "documents":
        ids = torch.arange(seq_len) * 8 // seq_len
        keep = ids[:, None] == ids[None, :]
    return Pair(
        _draw(1, HEADS, seq_len, dim),
        lambda q, k, v: rs.attention(q, k, v, attn_mask=keep),
        lambda q, k, v: _sdpa(q, k, v, attn_mask=keep),
    )


def _bias(seq_len: int, dim: int) -> Pair:
    bias = torch.randn(seq_len, seq_len, generator=torch.Generator().manual_seed(2))
    return Pair(
        _draw(1, HEADS, seq_len, dim),
        lambda q, k, v: rs.attention(q, k, v, attn_mask=bias),
        lambda q, k, v: _sdpa(q, k, v, attn_mask=bias),
    )


def _packed(seq_len: int) -> Pair:
    count, length = 4, seq_len // 4
    rule = rs.documents(lengths=[length] * count)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rs.attention(q, k, v, mask=rule, layout="TND").view(count, length, HEADS, 64)

    def batch(*qkv: Tensor) -> Tensor:
        return rs.attention(*(x.view(count, length, HEADS, 64) for x in qkv), mask=rs.causal(), layout="BSND")

    return Pair(_draw(seq_len, HEADS, 64), packed, batch)

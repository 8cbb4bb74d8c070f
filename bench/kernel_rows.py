"""Rows kernel/...: one process, our kernel against PyTorch's flash attention for CPUs, forward and backward apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import peak
import torch
from reference import Distance, distance_to, judge, reference_of
from ringspan.bench.clock import Clock, Side
from settings import Settings, run_each
from shapes import Case, kernel_target
from torch import Tensor
from turns import first_calls, shortest_in_turns

import ringspan as rs

_aten = torch.ops.aten
# PyTorch converts fp16 element by element in its backward: a minute for one call. Ours is timed alone there.
_PEER_IS_TOO_SLOW = 2048


def names(settings: Settings) -> list[str]:
    """All rows, those that share a reference next to each other."""
    return list(_rows(settings))


def run(selected: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Times and checks each selected row."""
    return run_each(_rows(settings), selected, _run_row, settings)


def _rows(settings: Settings) -> dict[str, tuple[Case, int]]:
    lengths = (256,) if settings.quick else (1024, 4096)
    dims = (64,) if settings.quick else (64, 128)
    found = {}
    shapes = itertools.product(("fp32", "bf16", "fp16"), lengths, dims, ("full", "causal"), (False, True))
    for dtype, seq_len, head_dim, mask, backward in shapes:
        for threads in settings.threads:
            case = Case(dtype, mask, seq_len, head_dim, backward)
            direction = "backward" if backward else "forward"
            found[f"kernel/{dtype}/{direction}/{mask}/S{seq_len}/D{head_dim}/T{threads}"] = (case, threads)
    return found


def _run_row(case: Case, threads: int, settings: Settings) -> dict[str, Any]:
    torch.set_num_threads(threads)
    sides = _prepare(case)
    clock = Clock()
    results, first = first_calls(clock, sides)
    isa = torch.ops.ringspan._isa()
    peaks = []
    sides["peak"] = lambda: peaks.append(peak.flops_per_second(isa, case.torch_dtype, threads, 0.02))
    reference = reference_of(Case(case.dtype, case.mask, case.seq_len, case.head_dim))
    expected = reference.grads if case.backward else (reference.out,)
    distances = {
        name: distance_to(expected, tuple(result[0, reference.head] for result in found))
        for name, found in results.items()
    }
    seconds = shortest_in_turns(clock, sides, first, settings.budget_s)
    return _describe(case, threads, seconds, max(peaks), distances)


def _prepare(case: Case) -> dict[str, Side]:
    """What to time: calls that return the output, or the three gradients, as a tuple."""
    *qkv, dout = case.inputs()
    mask = rs.causal() if case.mask == "causal" else rs.full()

    def ours() -> tuple[Tensor, ...]:
        return (rs.attention(*qkv, mask=mask),)

    def pytorch() -> tuple[Tensor, ...]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, case.mask == "causal")[:1]

    forward = {"ours": ours, "pytorch": pytorch}
    if not case.backward:
        return forward
    if case.dtype == "fp16" and case.seq_len > _PEER_IS_TOO_SLOW:
        del forward["pytorch"]
    for x in qkv:
        x.requires_grad_()
    outs = {name: run()[0] for name, run in forward.items()}

    def differentiate(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, qkv, dout, retain_graph=True)

    return {name: (lambda out=out: differentiate(out)) for name, out in outs.items()}


def _describe(
    case: Case, threads: int, seconds: dict[str, float], peak_flops: float, distances: dict[str, Distance]
) -> dict[str, Any]:
    target = kernel_target(case)
    flops = case.flops(forward=not case.backward, backward=case.backward)
    share = flops / seconds["ours"] / peak_flops
    ratio = seconds["pytorch"] / seconds["ours"] if "pytorch" in seconds else None
    return {
        "threads": threads,
        "milliseconds": {name: seconds[name] * 1e3 for name in distances},
        "gflops": flops / seconds["ours"] / 1e9,
        "peak_gflops": peak_flops / 1e9,
        "goals": [
            {"name": "ratio", "what": "x PyTorch", "value": ratio, "at_least": target.ratio},
            {"name": "share_of_peak", "what": "of peak", "value": share, "at_least": target.share},
        ],
        "errors": {name: vars(distance) for name, distance in distances.items()},
        "wrong": judge(case.dtype, case.backward, distances["ours"], distances.get("pytorch")),
    }

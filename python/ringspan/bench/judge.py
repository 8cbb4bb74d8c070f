"""Whether the paths are right, and whether they send what the ledger says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringspan.bench.config import Config
from ringspan.bench.inputs import NAMES, Inputs, empty_reference, has_reference, reference_of
from ringspan.bench.paths import REPLICATED, MeasuredPath
from ringspan.bench.ranks import Ranks

# Relative to the largest value of what is compared with; for gradients that is the largest of all three, because dq and
# dk are differences of terms as large as dv (they vanish where a query sees one key only). fp32 and fp64: sums in
# another order; half types: two roundings of a result, four of a gradient, which is also rounded where it is summed.
FORWARD = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-7, "float16": 2.0**-10}
BACKWARD = {"float32": 5e-5, "float64": 1e-12, "bfloat16": 2.0**-6, "float16": 2.0**-9}

_SHOWN_FAULTS = 4


class RunFailed(Exception):
    """A run came to a bad end on every rank alike; `kind` is that of the result file."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def tolerance(name: str, dtype: str, against: str) -> float:
    """The largest error of `name` relative to the largest value; two results of one dtype may both be off by it."""
    once = (FORWARD if name == "out" else BACKWARD)[dtype]
    return once if against == "float64" else 2 * once


def check_paths(
    config: Config, ranks: Ranks, inputs: Inputs, paths: dict[str, MeasuredPath], beat: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Runs every path once; the entries `errors`, `messages` and `bytes` of each, alike on every rank. Collective.

    Results are compared with the replicated path and, where the problem is small, with a float64 reference.
    """
    reference = _reference(config, ranks, inputs)
    found: dict[str, Any] = {}
    replicated: list[Tensor] = []
    for done, (name, path) in enumerate(paths.items()):
        beat("checking", done, len(paths))
        before = path.posted()
        results = list(path.run())
        ranks.synchronize()
        posted = [after - start for after, start in zip(path.posted(), before, strict=True)]
        results = _own_rows(config, ranks, path, results)
        replicated = results if name == REPLICATED else replicated
        errors = {}
        sides = [] if name == REPLICATED else [("replicated", replicated)]
        for against, expected in [*sides, *([("float64", reference)] if reference else [])]:
            errors[against] = _compare(config, ranks, results, expected, against)
        counted = ranks.gather(posted)
        ledger = [path.ledger(rank) for rank in range(ranks.world)]
        found[name] = {
            "errors": errors,
            "messages": {"ledger": [m for m, _ in ledger], "counted": [m for m, _ in counted]},
            "bytes": {"ledger": [b for _, b in ledger], "counted": [b for _, b in counted]},
        }
    return found


def find_faults(checked: dict[str, Any]) -> RunFailed | None:
    """The first kind of fault in what `check_paths` found: wrong results come before wrong bytes."""
    wrong = [
        f"{path}: {name} is off by {_number(error['max_abs'])} from {against}, at most {error['limit']:.3g}"
        for path, entry in checked.items()
        for against, names in entry["errors"].items()
        for name, error in names.items()
        if error["max_abs"] is None or not error["max_abs"] <= error["limit"]
    ]
    if wrong:
        return RunFailed("wrong_result", _join(wrong))
    miscounted = [
        f"{path}: {what} per rank are {entry[what]['counted']}, but the ledger says {entry[what]['ledger']}"
        for path, entry in checked.items()
        for what in ("bytes", "messages")
        if entry[what]["counted"] != entry[what]["ledger"]
    ]
    return RunFailed("wrong_bytes", _join(miscounted)) if miscounted else None


def largest_error(entry: dict[str, Any]) -> float | None:
    """The largest distance of a path to the replicated one; None where it is not finite, or nothing was compared."""
    errors = [error["max_abs"] for error in entry["errors"].get("replicated", {}).values()]
    return None if not errors or None in errors else max(errors)


def _reference(config: Config, ranks: Ranks, inputs: Inputs) -> list[Tensor]:
    """This rank's rows of the float64 reference, which rank 0 computes; empty where the problem is too large."""
    if not has_reference(config):
        return []
    causal = config.mask == "causal"
    whole = reference_of(inputs.whole, causal) if ranks.rank == 0 else empty_reference(config)
    smap = config.shard_map()
    return [smap.shard(ranks.from_first(x.contiguous()), ranks.rank, dim=2) for x in whole]


def _own_rows(config: Config, ranks: Ranks, path: MeasuredPath, results: list[Tensor]) -> list[Tensor]:
    """Results as float64 on the CPU; where K/V gradients are partial, their sums in this rank's rows."""
    results = [x.detach().double().cpu() for x in results]
    if path.partial:
        smap = config.shard_map()
        results[2:] = [smap.shard(ranks.total(x.contiguous()), ranks.rank, dim=2) for x in results[2:]]
    return results


def _compare(
    config: Config, ranks: Ranks, results: list[Tensor], expected: list[Tensor], against: str
) -> dict[str, dict[str, float | None]]:
    """For each result the largest distance over all ranks and its limit; None for what is not finite."""
    distances = [
        _largest((got - want).abs().nan_to_num(nan=math.inf)) for got, want in zip(results, expected, strict=True)
    ]
    sizes = [_largest(want.abs()) for want in expected]
    largest, scale = ranks.largest(torch.tensor([distances, sizes], dtype=torch.float64)).tolist()
    scale[1:] = [max(scale[1:], default=0.0)] * len(scale[1:])
    return {
        name: {
            "max_abs": distance if math.isfinite(distance) else None,
            "limit": tolerance(name, config.dtype, against) * size,
        }
        for name, distance, size in zip(NAMES, largest, scale, strict=False)
    }


def _join(faults: list[str]) -> str:
    more = len(faults) - _SHOWN_FAULTS
    return "; ".join(faults[:_SHOWN_FAULTS]) + (f"; and {more} more" if more > 0 else "")


def _largest(x: Tensor) -> float:
    return x.max().item() if x.numel() else 0.0


def _number(value: float | None) -> str:
    return "an infinite or undefined value" if value is None else f"{value:.3g}"

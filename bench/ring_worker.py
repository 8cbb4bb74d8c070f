"""One rank's side of the rows of ring_rows.py. All ranks call everything here in the same order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_ring import PytorchRing
from reference import distance_to
from ring_cases import ring_cases, schedule_cases
from ringspan.bench.clock import Clock
from ringspan.bench.ranks import Ranks
from ringspan.names import SCHEDULES
from session import end_with_parent
from settings import Settings
from shapes import RING_MIN_SEQ_LEN, RING_RATIO, RING_SLOWDOWN, SCHEDULE_OVER_RING, Case
from torch import Tensor
from turns import median_of, shortest_in_turns

import ringspan as rs

_LOCAL_THREADS = 2
_EXCHANGES = ("all_to_all", "p2p")
# By whether there is a backward: forward of q_ring is the ring's. Hybrids and double rings need four ranks.
_SCHEDULES = {True: SCHEDULES[1:], False: [name for name in SCHEDULES[1:] if name != "q_ring"]}
# By messages between two ranks, gradients need a hop less and nobody waits for a third rank.
_BY_P2P = ("ring", "pruned")

Side = Callable[[], tuple[Tensor, ...]]


def work(group: dist.ProcessGroup, argument: tuple[list[str], Settings]) -> Iterator[dict[str, Any]]:
    """Works through the rows of these names, on every rank in this order."""
    end_with_parent()
    selected, settings = argument
    worker = RingWorker(Ranks(group), settings)
    for name in selected:
        yield {"name": name, **worker.run(name)}


class RingWorker:
    """Runs rows by name. Results are meant for rank 0."""

    def __init__(self, ranks: Ranks, settings: Settings) -> None:
        self.ranks, self.rank, self.world, self.settings = ranks, ranks.rank, ranks.world, settings
        self.clock = Clock(ranks)
        # The attention's group serves nothing else.
        self.group = dist.new_group()
        self.cases = ring_cases(settings) | schedule_cases(settings)

    def run(self, name: str) -> dict[str, Any]:
        """One row."""
        kind, exchange, *rest = name.split("/")
        if kind == "agreement":
            return self._run_agreement(exchange)
        if kind == "memory":
            return self._run_memory(exchange, backward=rest == ["forward_backward"])
        if kind == "schedules":
            return self._run_schedules(self.cases[name])
        return self._run_ring(self.cases[name])

    def _run_schedules(self, case: Case) -> dict[str, Any]:
        call, run_local = self._prepare(case)
        sides = {name: call(schedule=name, exchange="all_to_all") for name in _SCHEDULES[case.backward]}
        sides |= {f"{name}/p2p": call(schedule=name, exchange="p2p") for name in _BY_P2P}
        worst, first = self._check(case, sides, run_local)
        seconds = self._shortest(sides, first)
        best = min((name for name in sides if name != "ring"), key=seconds.__getitem__)
        goal = {
            "name": "best_over_ring",
            "what": f"x ring, {best}",
            "value": seconds[best] / seconds["ring"],
            "at_most": SCHEDULE_OVER_RING,
        }
        return {
            "threads": f"{self.world} x 1",
            "milliseconds": {side: value * 1e3 for side, value in seconds.items()},
            "goals": [goal],
            "best": best,
            "errors": worst,
            "wrong": _wrong(case, worst),
        }

    def _run_ring(self, case: Case) -> dict[str, Any]:
        call, run_local = self._prepare(case)
        ring_sides = {exchange: call(exchange=exchange) for exchange in _EXCHANGES}
        ring_sides["pytorch"] = self._pytorch_ring(case)
        worst, first = self._check(case, ring_sides, run_local)
        seconds = self._shortest({**ring_sides, "local": self._alone(run_local)}, first)
        direction = "forward_backward" if case.backward else "forward"
        judged = case.seq_len >= RING_MIN_SEQ_LEN
        ours = seconds["all_to_all"]
        return {
            "threads": f"{self.world} x 1",
            "milliseconds": {side: value * 1e3 for side, value in seconds.items()},
            "goals": [
                {
                    "name": "slowdown",
                    "what": "x own process",
                    "value": ours / seconds["local"],
                    "at_most": RING_SLOWDOWN[direction] if judged else None,
                },
                {
                    "name": "ratio",
                    "what": "x PyTorch's ring",
                    "value": seconds["pytorch"] / ours,
                    "at_least": RING_RATIO[case.dtype] if judged else None,
                },
                {"name": "slowdown_p2p", "what": "p2p x own process", "value": seconds["p2p"] / seconds["local"]},
            ],
            "errors": worst,
            "wrong": _wrong(case, {side: error for side, error in worst.items() if side != "pytorch"}),
        }

    def _prepare(self, case: Case) -> tuple[Callable[..., Side], Side]:
        """What makes a side of options of rs.attention; and our single process."""
        mask, self.smap = _split(case, self.world)
        *whole, whole_dout = case.inputs()
        qkv, dout = self._shards(case)
        for x in (*qkv, *whole):
            x.requires_grad_(case.backward)

        def ours(**choice: str) -> Side:
            options = {"mask": mask, "shard_map": self.smap, "group": self.group, **choice}
            return lambda: _attend(qkv, dout if case.backward else None, options)

        def local() -> tuple[Tensor, ...]:
            return _attend(whole, whole_dout if case.backward else None, {"mask": mask, "group": rs.LOCAL})

        return ours, local

    def _pytorch_ring(self, case: Case) -> Side:
        peer = PytorchRing(self.group, case.mask == "causal")
        qkv, dout = self._shards(case)
        return lambda: peer.forward_backward(qkv, dout) if case.backward else peer.forward(*qkv)[:1]

    def _shards(self, case: Case) -> tuple[tuple[Tensor, ...], Tensor]:
        *qkv, dout = [self.smap.shard(x, self.rank, dim=2).contiguous() for x in case.inputs()]
        return tuple(qkv), dout

    def _check(
        self,
        case: Case,
        ring_sides: dict[str, Side],
        run_local: Side,
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Runs each side once: its distance to the single process, and its seconds.

        The distance is the largest for fp32, else the RMS; the worst of all ranks.
        """
        whole = [torch.empty_like(x) for x in case.inputs()[: 4 if case.backward else 1]]
        if self.rank == 0:
            torch.set_num_threads(_LOCAL_THREADS)
            whole = [x.contiguous() for x in run_local()]
            torch.set_num_threads(1)
        for x in whole:
            dist.broadcast(x, 0)
        expected = tuple(self.smap.shard(x, self.rank, dim=2) for x in whole)
        worst, first = {}, {}
        for side, run in ring_sides.items():
            result, first[side] = self.clock.call(run)
            distance = distance_to(expected, result)
            error = torch.tensor(distance.largest if case.dtype == "fp32" else distance.rms, dtype=torch.float64)
            worst[side] = self.ranks.largest(error).item()
        return worst, first

    def _shortest(self, sides: dict[str, Callable[[], Any]], first: dict[str, float]) -> dict[str, float]:
        return shortest_in_turns(self.clock, sides, first, 2 * self.settings.budget_s)

    def _alone(self, run_local: Side) -> Side:
        """Rank 0 uses both cores; the others wait without using one."""

        def run() -> None:
            if self.rank == 0:
                torch.set_num_threads(_LOCAL_THREADS)
                run_local()
                torch.set_num_threads(1)

        return run

    def _run_agreement(self, exchange: str) -> dict[str, Any]:
        """A call so small that only its fixed costs remain, with and without the comparison of calls."""
        smap = rs.ShardMap.contiguous(2 * self.world, self.world)
        q, k, v = torch.randn(3, 1, 1, 2, 16).unbind()
        medians = {}
        for agreed in (False, True):
            options = {"shard_map": smap, "group": self.group, "exchange": exchange, "assume_agreed": agreed}
            call = partial(rs.attention, q, k, v, **options)
            seconds = median_of(self.clock, call, 20 if self.settings.quick else 200)
            medians["without" if agreed else "with"] = seconds * 1e3
        return {
            "threads": f"{self.world} x 1",
            "milliseconds": medians,
            "goals": [{"name": "agreement_ms", "what": "ms", "value": medians["with"] - medians["without"]}],
            "wrong": None,
        }

    def _run_memory(self, exchange: str, backward: bool) -> dict[str, Any]:
        """Peak of resident memory during a call, less what was there before and what the call returns."""
        batch, heads, rows, head_dim = (1, 2, 256, 64) if self.settings.quick else (8, 8, 1024, 128)
        smap = rs.ShardMap.head_tail(rows * self.world, self.world)
        q, k, v, dout = torch.randn(4, batch, heads, rows, head_dim).unbind()
        for x in (q, k, v):
            x.requires_grad_(backward)
        options = {"mask": rs.causal(), "shard_map": smap, "group": self.group, "exchange": exchange}
        _attend((q[:1], k[:1], v[:1]), dout[:1] if backward else None, options)
        _release_free_memory()
        _reset_peak()
        before = _status_bytes("VmRSS")
        results = _attend((q, k, v), dout if backward else None, options)
        extra = _status_bytes("VmHWM") - before - sum(x.nbytes for x in results)
        kv, fp32 = k.nbytes + v.nbytes, q.numel() * 4
        allowed = 2 * kv + fp32 + (64 << 20) + (2 * 2 * fp32 if backward else 0)
        worst = self.ranks.largest(torch.tensor(extra, dtype=torch.float64))
        goal = {
            "name": "extra_mb",
            "what": "MB beyond in and out",
            "value": worst.item() / 1e6,
            "at_most": allowed / 1e6,
        }
        return {
            "threads": f"{self.world} x 1",
            "milliseconds": {},
            "goals": [goal],
            "wrong": None,
        }


def _split(case: Case, world: int) -> tuple[rs.Mask, rs.ShardMap]:
    """Mask and map. Causal is balanced head-tail; a window and documents are where no rank's rows lie apart."""
    make_map = rs.ShardMap.head_tail if case.mask == "causal" else rs.ShardMap.contiguous
    smap = make_map(case.seq_len, world)
    if case.mask == "window":
        return rs.window(case.seq_len // 8, 0), smap
    if case.mask == "documents":
        # Of many lengths; one lies on both sides of the middle.
        shares = (3, 1, 2, 6, 1, 3)
        return rs.documents(lengths=[case.seq_len * share // 16 for share in shares]), smap
    return (rs.causal() if case.mask == "causal" else rs.full()), smap


def _wrong(case: Case, worst: dict[str, float]) -> str | None:
    limit = (5e-5 if case.backward else 1e-5) if case.dtype == "fp32" else 2e-3
    wrong = [f"{side}: {error:.1e} away from one process" for side, error in worst.items() if not error <= limit]
    return "; ".join(wrong) or None


def _attend(qkv: Any, dout: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Output, and with `dout` the gradients too."""
    out = rs.attention(*qkv, **options)
    if dout is None:
        return (out,)
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


def _release_free_memory() -> None:
    """Gives back what malloc keeps of freed memory: reused, it would not show as growth."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release:
        release(0)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the system does not tell {field}")

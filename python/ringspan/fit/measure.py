"""One rank's side of a fit: kernels, copies, links, overlap and fixed costs, measured as the product uses them.

Every rank computes at the same time, so that what ranks of a node share (memory, power) is in the figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.bench.clock import Clock
from ringspan.bench.ranks import Ranks
from ringspan.names import DTYPE_NAMES

_HEADS = 4
_SMALL, _LARGE = 4 << 10, 8 << 20


@dataclass(frozen=True)
class Request:
    """What to measure. `ranks_per_node` tells which ranks are of one node; the others are reached over the network."""

    dtypes: tuple[str, ...] = ("fp32", "bf16")
    head_dims: tuple[int, ...] = (64, 128)
    ranks_per_node: int = 2
    seq_len: int = 1024
    repeats: int = 7


DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def measure(group: dist.ProcessGroup, request: Request) -> Iterator[dict[str, Any]]:
    """Yields one result after another, each with its "kind"; solve.py makes a description of them."""
    is_cuda = "nccl" in str(dist.get_backend(group))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    rank = _Rank(group, device, request)
    for dtype in request.dtypes:
        for head_dim in request.head_dims:
            yield from rank.kernels(dtype, head_dim)
    yield rank.copies()
    yield from rank.links()
    yield rank.overlap()
    yield rank.calls()


class _Rank:
    def __init__(self, group: dist.ProcessGroup, device: torch.device, request: Request) -> None:
        self.group, self.device, self.request = group, device, request
        ranks = Ranks(group, device)
        self.rank, self.world, self.clock = ranks.rank, ranks.world, Clock(ranks)

    def _inputs(self, dtype: str, heads: int, rows: int, head_dim: int) -> list[Tensor]:
        tensors = torch.randn(4, 1, heads, rows, head_dim, device=self.device).to(DTYPES[dtype]).unbind()
        return [x.contiguous() for x in tensors]

    def kernels(self, dtype: str, head_dim: int) -> Iterator[dict[str, Any]]:
        """Masks of different numbers of pairs for a row: what a pair costs and what a row costs can be told apart."""
        seq_len = self.request.seq_len
        documents = [seq_len // 16] * 16
        masks = {
            "full": rs.full(),
            "causal": rs.causal(),
            "window": rs.window(left=seq_len // 8 - 1, right=0),
            "documents": rs.documents(lengths=documents),
        }
        *qkv, dout = self._inputs(dtype, _HEADS, seq_len, head_dim)
        for name, mask in masks.items():
            forward, backward = self._times(qkv, dout, mask)
            plan = rs.plan(*(tuple(x.shape) for x in qkv), dtype=DTYPES[dtype], mask=mask)
            ledger = plan.ledger().rank(0)
            rows = sum(tile["q_rows"] + tile["kv_rows"] for tile in plan.rank(0).forward[0]["tiles"]) * _HEADS
            yield {
                "kind": "kernel",
                "dtype": dtype,
                "head_dim": head_dim,
                "mask": name,
                "rows": rows,
                "forward": {"seconds": forward, "flops": ledger.forward.flops},
                "backward": {"seconds": backward, "flops": ledger.backward.flops},
            }

    def _times(self, qkv: list[Tensor], dout: Tensor, mask: Any, **options: Any) -> tuple[float, float]:
        """Shortest seconds of forward and of backward."""
        leaves = [x.detach().requires_grad_() for x in qkv]
        best = [float("inf")] * 2
        for _ in range(self.request.repeats + 1):
            out: list[Any] = []

            def forward(out: list[Any] = out) -> None:
                out.append(rs.attention(*leaves, mask=mask, **({"group": rs.LOCAL} | options)))

            def backward(out: list[Any] = out) -> None:
                torch.autograd.grad(out[0], leaves, dout)

            spans = self.clock.parts([forward, backward])
            best = [min(a, b) for a, b in zip(best, spans, strict=True)]
        return best[0], best[1]

    def copies(self) -> dict[str, Any]:
        """Into fresh memory, as messages are packed."""
        source = torch.zeros(_LARGE, dtype=torch.uint8, device=self.device)
        seconds = self.clock.shortest(lambda: source.clone(), 3 * self.request.repeats)
        return {"kind": "copy", "bytes": _LARGE, "seconds": seconds}

    def links(self) -> Iterator[dict[str, Any]]:
        """Exchanges in pairs: neighbours of a node, and places of neighbouring nodes."""
        per_node = self.request.ranks_per_node
        classes: dict[str, int] = {}
        if per_node > 1 and self.world > 1:
            classes["node"] = self.rank ^ 1
        if self.world >= 2 * per_node:
            node = self.rank // per_node
            classes["network"] = self.rank + (per_node if node % 2 == 0 else -per_node)
        for name, other in classes.items():
            partner: int | None = other
            if other >= self.world or (name == "node" and other // per_node != self.rank // per_node):
                partner = None
            for size in (_SMALL, 1 << 18, 1 << 20, _LARGE):
                exchange = partial(self._exchange, partner, size)
                seconds = self.clock.shortest(exchange, 3 * self.request.repeats)
                yield {"kind": "link", "class": name, "bytes": size, "seconds": seconds}

    def _exchange(self, partner: int | None, size: int) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(self._begin_exchange(partner, size))

    def _begin_exchange(self, partner: int | None, size: int) -> Tensor:
        splits = [size if rank == partner else 0 for rank in range(self.world)]
        send = torch.empty(sum(splits), dtype=torch.uint8, device=self.device)
        return torch.ops._c10d_functional.all_to_all_single(send, splits, splits, self.group.group_name)

    def overlap(self) -> dict[str, Any]:
        """A computation alone, an exchange alone, and the exchange beside the computation."""
        dtype, head_dim = self.request.dtypes[0], self.request.head_dims[0]
        q, k, v, _ = self._inputs(dtype, _HEADS, self.request.seq_len, head_dim)
        partner = self.rank ^ 1 if self.rank ^ 1 < self.world else None

        def compute() -> Any:
            return rs.attention(q, k, v, group=rs.LOCAL)

        def together() -> None:
            message = self._begin_exchange(partner, _LARGE)
            compute()
            torch.ops._c10d_functional.wait_tensor(message)

        repeats = 2 * self.request.repeats
        return {
            "kind": "overlap",
            "compute": self.clock.shortest(compute, repeats),
            "message": self.clock.shortest(lambda: self._exchange(partner, _LARGE), repeats),
            "together": self.clock.shortest(together, repeats),
        }

    def calls(self) -> dict[str, Any]:
        """Calls so small that only their fixed costs remain: of a rank alone, and of two ranks and two steps."""
        *qkv, dout = self._inputs("fp32", 1, 2, 16)
        alone = self._times(qkv, dout, rs.full())
        result: dict[str, Any] = {"kind": "calls", "alone": alone}
        if self.world > 1:
            smap = rs.ShardMap.contiguous(2 * self.world, self.world)
            result["ring"] = self._times(qkv, dout, rs.full(), shard_map=smap, group=self.group, schedule="ring")
            result["world"] = self.world
        return result

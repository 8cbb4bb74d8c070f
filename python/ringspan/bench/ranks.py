"""The ranks of a run: a process group whose failures all look alike, and which counts the bytes that it is handed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.errors import PeerError


class Alone:
    """This process alone, where there is no group, with what a clock asks of `Ranks`."""

    def barrier(self) -> None:
        """Nobody is waited for."""

    def synchronize(self) -> None:
        """The CPU has nothing to wait for."""

    def slowest(self, seconds: list[float]) -> list[float]:
        """As they are."""
        return seconds


class Ranks:
    """`group` seen from this rank. Every method is a collective and raises PeerError if a peer is lost or silent."""

    def __init__(self, group: dist.ProcessGroup, device: str | torch.device = "cpu") -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device)
        self.posted_bytes = 0  # to other ranks, by gather_rows and reduce_rows
        self.posted_messages = 0

    def barrier(self) -> None:
        """Returns when every rank has come."""
        with _failures_of_peers():
            dist.barrier(self.group)

    def synchronize(self) -> None:
        """Waits for this rank's device; the CPU has nothing to wait for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: list[float]) -> list[float]:
        """The longest of all ranks, one by one."""
        return self.largest(torch.tensor(seconds, dtype=torch.float64)).tolist()

    def largest(self, values: Tensor) -> Tensor:
        """The largest of all ranks, element by element; `values` float64 of any shape, on the CPU."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, element by element."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, in rank order; plain data."""
        found: list[Any] = [None] * self.world
        with _failures_of_peers():
            dist.all_gather_object(found, value, self.group)
        return found

    def from_first(self, values: Tensor) -> Tensor:
        """The values of rank 0; the others give a tensor of the same shape, which is overwritten."""
        moved = values.to(self.device)
        with _failures_of_peers():
            dist.broadcast(moved, group=self.group, group_src=0)
        return moved.to(values.device)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """All ranks' rows along dim 0, in rank order; equal shapes, contiguous. The all-gather of the benchmark."""
        if self.world == 1:
            return rows
        whole = rows.new_empty((self.world * rows.shape[0], *rows.shape[1:]))
        with _failures_of_peers():
            dist.all_gather_single(whole, rows, group=self.group)
        self._count(rows.nbytes)
        return whole

    def reduce_rows(self, whole: Tensor) -> Tensor:
        """The transpose of gather_rows: this rank's rows of the sum over ranks."""
        if self.world == 1:
            return whole
        rows = whole.new_empty((whole.shape[0] // self.world, *whole.shape[1:]))
        with _failures_of_peers():
            dist.reduce_scatter_single(rows, whole, group=self.group)
        self._count(rows.nbytes)
        return rows

    def _count(self, bytes_for_each: int) -> None:
        self.posted_bytes += (self.world - 1) * bytes_for_each
        self.posted_messages += 1

    def _reduce(self, values: Tensor, op: Any) -> Tensor:
        moved = values.to(self.device, copy=True)
        with _failures_of_peers():
            dist.all_reduce(moved, op, group=self.group)
        return moved.to(values.device)


@contextlib.contextmanager
def _failures_of_peers() -> Iterator[None]:
    """Backends report a lost peer as one RuntimeError or another; memory is the only other thing that can fail."""
    try:
        yield
    except (PeerError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        # The first sentence says what happened; advice follows.
        text = str(error).partition(". ")[0]
        raise PeerError(f"a collective of the benchmark failed: {text}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out. PyTorch has a type for devices only; the CPU's is known by its text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)

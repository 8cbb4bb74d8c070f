"""Captured graphs: the ops of a block are recorded once and run again on the same tensors.

    capture     y = f(x)      records  (op, inputs, outputs)  in order
    replay      each op runs again on its recorded inputs; what it returns is copied into its recorded outputs

So whoever fills x and replays finds the new y in the old tensor. Ops that draw random numbers draw again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result


class NPUGraph:
    """A recorded block. Holds every tensor of it."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple, dict, Any]] = []
        self._recorder: _Recorder | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Records from here on. RuntimeError if this graph records already."""
        if self._recorder is not None:
            raise RuntimeError("this graph is being captured already; call capture_end() first")
        self._calls.clear()
        self._recorder = _Recorder(self._calls)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """Records no more. RuntimeError if this graph does not record."""
        if self._recorder is None:
            raise RuntimeError("this graph is not being captured; call capture_begin() first")
        recorder, self._recorder = self._recorder, None
        recorder.__exit__(None, None, None)

    def replay(self) -> None:
        """Runs every recorded op again, in order. RuntimeError where an op returns another size than it did."""
        if self._recorder is not None:
            raise RuntimeError("this graph is being captured; call capture_end() before replay()")
        with torch.no_grad():
            for func, args, kwargs, recorded in self._calls:
                _copy_into(recorded, func(*args, **kwargs), [*args, *kwargs.values()])

    def reset(self) -> None:
        """Forgets what was recorded."""
        self._calls.clear()


@contextmanager
def graph(npu_graph: NPUGraph, pool: Any = None, stream: Any = None, **ignored: Any) -> Iterator[None]:
    """Captures the block into `npu_graph`."""
    npu_graph.capture_begin()
    try:
        yield
    finally:
        npu_graph.capture_end()


def _copy_into(recorded: Any, found: Any, inputs: list) -> None:
    """Values of the tensors in `found` to those in `recorded`; views of an input and changed inputs have theirs."""
    storages = {one.untyped_storage().data_ptr() for one in tree_leaves(inputs) if isinstance(one, Tensor)}
    for old, new in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
        if not isinstance(new, Tensor) or new.untyped_storage().data_ptr() in storages:
            continue
        if old.shape != new.shape:
            raise RuntimeError(f"a replayed op returns {list(new.shape)}, and returned {list(old.shape)} when captured")
        old.copy_(new)

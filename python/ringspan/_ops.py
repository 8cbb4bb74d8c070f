"""Teaches PyTorch's modes about the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ringspan._library
from ringspan.importing import when_imported


def _rule_of_visible(visible: torch._ops.OpOverload) -> Callable[..., Any]:
    """Make the rule by which CommDebugMode sees the collectives inside an op.

    `visible` runs the same C++ code as the op. CommDebugMode would call the op with itself switched off, and so count
    nothing inside; the rule switches it on again around `visible`.
    """
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    def rule(
        mode: TorchDispatchMode, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        # Not `with mode`: CommDebugMode's own __enter__ forgets what it has counted.
        TorchDispatchMode.__enter__(mode)
        try:
            return visible.decompose(*args, **(kwargs or {}))
        finally:
            TorchDispatchMode.__exit__(mode, None, None, None)

    return rule


def let_see_inside(mode: type) -> None:
    """Make every mode of this class see the collectives inside the ops. Once for each class."""
    ops = torch.ops.ringspan
    for op, visible in (
        (ops.attention, ops.attention),
        (ops.attention_forward, ops._visible_attention_forward),
        (ops.attention_backward, ops._visible_attention_backward),
        (ops._contract_forward, ops._visible_contract_forward),
        (ops._contract_backward, ops._visible_contract_backward),
    ):
        torch.library.register_torch_dispatch(op.default, mode, _rule_of_visible(visible.default))


# Loaded here, because the kernels of the step ops belong to the library as its C++ ones do.
import ringspan.device  # noqa: E402, F401


def _register_comm_debug_mode() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    let_see_inside(CommDebugMode)


when_imported("torch.distributed.tensor.debug", _register_comm_debug_mode)

"""F.scaled_dot_product_attention on DTensors, and on plain CPU tensors inside `ringspan.sdpa()`, by our attention.

Where a call can come from, and who meets it:

    F.scaled_dot_product_attention            a Python function of ours: torch.compile guards on what it reads
    a reference to it from before, C++        kernels for the keys AutogradCPU and CPU (inference_mode skips the first)
    the same on DTensors in inference_mode    a rule of DTensor

Everything that is not for us goes on to PyTorch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ringspan.attention import attention_inside
from ringspan.dtensor import private
from ringspan.dtensor.peers import tell_sequence_group
from ringspan.dtensor.split import ENABLED, check_traceable, split_in_effect
from ringspan.entry import enters, has_dtensors
from ringspan.group import LOCAL
from ringspan.masks import causal, full
from ringspan.plain import OFFERED_DTYPES

_aten_sdpa = torch.ops.aten.scaled_dot_product_attention.default


class SdpaHook:
    """In place from its creation until `remove()`. One for DTensors, one for plain tensors, in any order."""

    def __init__(self) -> None:
        _USERS.append(self)
        if len(_USERS) == 1:
            _install()

    def remove(self) -> None:
        """The last one takes everything away."""
        _USERS.remove(self)
        if not _USERS:
            _uninstall()


@contextlib.contextmanager
def sdpa() -> Iterator[None]:
    """Inside, F.scaled_dot_product_attention on plain CPU tensors runs on our kernels.

    Same arguments and results; calls that we do not take (other devices, dtypes or numbers of dimensions) run on
    PyTorch's. Contexts nest.
    """
    hook = SdpaHook()
    _PLAIN.append(hook)
    try:
        yield
    finally:
        _PLAIN.remove(hook)
        hook.remove()


_USERS: list[SdpaHook] = []
_PLAIN: list[SdpaHook] = []  # those of `sdpa()`
_INSTALLED: dict[str, Any] = {}


def _install() -> None:
    original = F.scaled_dot_product_attention
    # PyTorch's context manager recognises its own function when it takes it away: never wrap that one.
    if not private.is_inside_context_parallel():
        _INSTALLED["original"] = original
        _INSTALLED["wrapper"] = F.scaled_dot_product_attention = _in_front_of(original, is_guarded=True)
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "CPU"):
        library.impl("scaled_dot_product_attention", _kernel, key)
    _INSTALLED["library"] = library


def _uninstall() -> None:
    _INSTALLED.pop("library")._destroy()
    if "wrapper" in _INSTALLED:
        wrapper, original = _INSTALLED.pop("wrapper"), _INSTALLED.pop("original")
        if F.scaled_dot_product_attention is wrapper:
            F.scaled_dot_product_attention = original
        else:
            private.restore_later(wrapper, original)


def _in_front_of(original: Callable[..., Tensor], is_guarded: bool) -> Callable[..., Tensor]:
    """PyTorch's signature: our attention where the call is for us, else `original`.

    is_guarded: torch.compile sees this function, and traces anew when what it reads has changed.
    """

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """PyTorch's, with ringspan in front of it."""
        if not _is_ours(query, key, value, attn_mask):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if not is_guarded:
            check_traceable(split_in_effect())
        return _attend(query, key, value, attn_mask, _Options(dropout_p, is_causal, scale, enable_gqa))

    return scaled_dot_product_attention


_kernel = _in_front_of(private.composite_attention, is_guarded=False)


def _is_ours(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> bool:
    if has_dtensors(query, key, value, attn_mask):
        return bool(ENABLED.splits)
    plain = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    return (
        bool(_PLAIN)
        and query.dim() in (3, 4)
        and key.dim() == value.dim() == query.dim()
        and query.dtype in OFFERED_DTYPES
        and all(tensor.device.type == "cpu" for tensor in plain)
    )


@dataclass(frozen=True)
class _Options:
    """What PyTorch's function takes beside tensors."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


@enters(tell_sequence_group)
def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, options: _Options) -> Tensor:
    """[B, N, S, D], or [N, S, D] of plain tensors."""
    if options.is_causal and attn_mask is not None:
        raise RuntimeError("is_causal=True and attn_mask are both given to scaled_dot_product_attention; give one")
    if query.dim() == 3 and not isinstance(query, DTensor):
        q, k, v = (tensor.unsqueeze(0) for tensor in (query, key, value))
        return _attend(q, k, v, attn_mask, options).squeeze(0)
    if not options.enable_gqa and query.shape[1] != key.shape[1]:
        raise RuntimeError(f"query has {query.shape[1]} heads and key {key.shape[1]}; give it enable_gqa=True")
    return attention_inside(
        query,
        key,
        value,
        mask=causal(align="top_left") if options.is_causal else full(),
        attn_mask=attn_mask,
        dropout_p=options.dropout_p,
        scale=options.scale,
        group=None if has_dtensors(query, key, value, attn_mask) else LOCAL,
    )


def register() -> None:
    """Teaches DTensor the op, for inference_mode. Once for each process."""

    def rule(cls: type, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None) -> Any:
        return _kernel(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(_aten_sdpa, DTensor, rule)

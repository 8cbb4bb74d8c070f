"""`torch.ops.npu`: the contract's ops on CPU tensors, over those of `torch.ops.ringspan`.

All are composite: autograd, tracing and tensor subclasses see ringspan's ops. Version 1 is version 3 with lists for
tensors and numbers for one-element tensors, so whatever serves version 3 (DTensor rules too) serves both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ringspan.compat.torch_npu.generator import Generator

OPS = torch.ops.ringspan
PACKETS = {
    "npu_fusion_attention": "fusion_attention",
    "npu_fusion_attention_v2": "fusion_attention_v2",
    "npu_fusion_attention_v3": "fusion_attention_v3",
    "npu_fusion_attention_grad": "fusion_attention_grad",
    "npu_fusion_attention_grad_v2": "fusion_attention_grad_v2",
    "npu_fusion_attention_grad_v3": "fusion_attention_grad_v3",
    "npu_ring_attention_update": "ring_attention_update",
    "_npu_dropout_gen_mask": "_dropout_gen_mask",
}
DRAW = "_npu_draw_seed"  # an op, so that a recorded graph draws anew at each replay
_LISTS = ("actual_seq_qlen", "actual_seq_kvlen")


class VendorOps:
    """The ops of the namespace, until `close`."""

    def __init__(self, generator: Generator) -> None:
        self._library = torch.library.Library("npu", "FRAGMENT")
        self._library.define(f"{DRAW}() -> (Tensor seed, Tensor offset)")
        self._library.impl(DRAW, generator.draw, "CompositeExplicitAutograd")
        special = {
            "npu_fusion_attention": _forward_v1,
            "npu_fusion_attention_grad": _grad_v1,
            "npu_fusion_attention_v2": _forward_v2,
            "npu_fusion_attention_v3": _forward_v3,
        }
        for name, source in PACKETS.items():
            op = getattr(OPS, source).default
            schema = str(op._schema).removeprefix(f"ringspan::{source}")
            self._library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
            self._library.impl(name, special.get(name, op), "CompositeImplicitAutograd")

    def packets(self) -> dict[str, Any]:
        """By name, as attributes of `torch_npu`."""
        return {name: getattr(torch.ops.npu, name) for name in PACKETS}

    def close(self) -> None:
        """Takes the ops away."""
        self._library._destroy()
        for name in (*PACKETS, DRAW):
            if name in vars(torch.ops.npu):
                delattr(torch.ops.npu, name)
                torch.ops.npu._dir = [one for one in torch.ops.npu._dir if one != name]


def _named(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments by name, with the schema's defaults."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    defaults = {one.name: one.default_value for one in op._schema.arguments if one.has_default_value()}
    return defaults | given


def _draws(named: dict[str, Any]) -> bool:
    """Whether the call draws from the device's generator. Traced calls draw from PyTorch's, in the graph."""
    traced = torch.compiler.is_compiling() or isinstance(named["query"], FakeTensor | DTensor)
    return 0 < named["keep_prob"] < 1 and not traced


def _forward_v3(*args: Any, **kwargs: Any) -> tuple:
    packet = OPS.fusion_attention_v3
    if not _draws(_named(packet.default, args, kwargs)):
        return packet.default(*args, **kwargs)
    seed, offset = getattr(torch.ops.npu, DRAW)()
    return packet.seeded(*args, **kwargs, dropout_seed=seed, dropout_offset=offset)


def _forward_v2(*args: Any, **kwargs: Any) -> tuple:
    packet = OPS.fusion_attention_v2
    named = _named(packet.default, args, kwargs)
    if not _draws(named) or _gives_seed(named):
        return packet.default(*args, **kwargs)
    seed, offset = getattr(torch.ops.npu, DRAW)()
    *results, _ = packet.seeded(*args, **kwargs, dropout_seed=seed, dropout_offset=offset)
    return (*results, _count_bits(named))


def _forward_v1(*args: Any, **kwargs: Any) -> tuple:
    named = _named(OPS.fusion_attention.default, args, kwargs)
    if named.pop("dropout_mask") is not None:
        raise RuntimeError("dropout_mask is given; it is not offered, dropout is drawn from seed and offset")
    numbers = {name: named.pop(name) for name in ("seed", "offset")}
    third = named | {name: _as_tensor(named[name]) for name in _LISTS}
    if _gives_seed(numbers) and 0 < named["keep_prob"] < 1:
        seed, offset = torch.tensor([numbers["seed"]]), torch.tensor([numbers["offset"]])
        results = OPS.fusion_attention_v3.seeded(**third, dropout_seed=seed, dropout_offset=offset)
    else:
        results = _forward_v3(**third)
    numels = _count_bits(named) if named["keep_prob"] < 1 else 0
    return (*results[:4], int(results[4]), int(results[5]), numels)


def _grad_v1(*args: Any, **kwargs: Any) -> tuple:
    named = _named(OPS.fusion_attention_grad.default, args, kwargs)
    del named["numels"]
    named |= {name: _as_tensor(named[name]) for name in _LISTS}
    named |= {name: torch.tensor([named[name]]) for name in ("seed", "offset")}
    return OPS.fusion_attention_grad_v3.default(**named)


def _gives_seed(named: dict[str, Any]) -> bool:
    return named["seed"] != 0 or named["offset"] != 0


def _as_tensor(ends: list[int] | None) -> Tensor | None:
    return None if ends is None else torch.tensor(ends, dtype=torch.int64)


def _count_bits(named: dict[str, Any]) -> int:
    """One bit for each pair of a query row and a key row of a head."""
    query, key, layout = named["query"], named["key"], named["input_layout"].upper()
    if layout == "TND":
        lengths = [torch.tensor(list(named[name])).diff(prepend=torch.tensor([0])).clamp(min=0) for name in _LISTS]
        return int((lengths[0] * lengths[1]).sum()) * named["head_num"]
    batch, rows = query.shape[layout.index("B")], layout.index("S")
    return batch * named["head_num"] * query.shape[rows] * key.shape[rows]

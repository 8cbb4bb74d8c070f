"""The contract's ops on DTensors: rules for the two opaque ops behind every version of fusion_attention.

Each unwraps, redistributes where placements are none that the op can take, runs the op on the local tensors (in the
group that shares out the sequence, if there is one), and wraps. Autograd runs above, in C++, and carries statistics,
seed and the chosen maps from the forward to the backward as it does for plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ringspan.dtensor.operands import common_mesh, in_place, map_of, read_operands, takes_part, wrap, wrap_gradient
from ringspan.dtensor.placements import (
    SINK_AXES,
    Role,
    TensorAxes,
    axes_of_layout,
    axes_of_pairs,
    axes_of_slopes,
    axes_of_stats,
    out_shape,
    stats_shape,
)
from ringspan.dtensor.private import local_of
from ringspan.dtensor.split import check_traceable, split_in_effect

_FIRST_COMPRESSED_MODE = 2  # from here on a mask says nothing that a rank could have a part of
_SLOPES = 2  # pse_type from here on: slopes instead of a bias
_SLOTS = 8  # equal numbers for each row in the statistics
_Named = dict[str, Any]
_TENSORS = ("query", "key", "value", "pse", "atten_mask", "sink", "dy", "softmax_max", "softmax_sum", "attention_in")
_SMALL = ("seed", "offset", "q_ends", "kv_ends")


class _Placed:
    """One call on DTensors: the roles of the mesh axes, and the op's arguments on local tensors."""

    def __init__(self, named: _Named, is_backward: bool = False) -> None:
        self.is_backward = is_backward
        self.mesh = common_mesh({name: named.get(name) for name in _TENSORS})
        self.layout = named["input_layout"].upper()
        tensors, self.sizes, self.roles = read_operands(named, self.mesh, self.layout, named["head_num"])
        self.named = named | dict(zip(("query", "key", "value"), tensors, strict=True))
        self.axes = axes_of_layout(self.layout)
        self.given_axes = {name: self._axes_of(name) for name in ("pse", "atten_mask", "sink")}

    def _axes_of(self, name: str) -> TensorAxes:
        tensor, named = self.named[name], self.named
        if tensor is None or (name == "atten_mask" and named["sparse_mode"] >= _FIRST_COMPRESSED_MODE):
            return {}
        if name == "sink":
            return SINK_AXES
        if name == "pse" and named["pse_type"] >= _SLOPES:
            return axes_of_slopes(tensor)
        return axes_of_pairs(tensor.shape)

    def local(self, name: str, axes: TensorAxes) -> Tensor | None:
        """This rank's part of an argument."""
        tensor = self.named[name]
        if tensor is None:
            return None
        return local_of(in_place(name, tensor, self.roles, axes, self.is_backward and name in self.given_axes))

    def arguments(self) -> _Named:
        """All arguments of the op for this rank."""
        local = self.named | {name: _whole(self.named[name]) for name in _SMALL}
        for name in ("query", "key", "value"):
            local[name] = self.local(name, self.axes)
        for name, axes in self.given_axes.items():
            local[name] = self.local(name, axes)
        local["head_num"] = self.named["head_num"] // self.roles.parts(Role.HEADS)
        local["batch_groups"] = self.roles.group_names(Role.BATCH)
        local["head_groups"] = self.roles.group_names(Role.HEADS)
        group = self.roles.sequence_group()
        if group is not None:
            local["in_group"], local["group_name"] = True, group.group_name
            self._fill_maps(local, group.size())
        return local

    def _fill_maps(self, local: _Named, world: int) -> None:
        """A backward finds the forward's maps in its arguments."""
        split = check_traceable(split_in_effect())
        local["exchange"] = split.exchange
        for name, rows in (("q_map", self.sizes.q_rows), ("kv_map", self.sizes.kv_rows)):
            if local[name] is None and not (split.is_contiguous and rows % world == 0):
                local[name] = map_of(split.make_map, rows, world).to_tensor()


def _whole(value: Any) -> Any:
    """Seeds and lengths come as replicated DTensors or plain."""
    if not isinstance(value, DTensor):
        return value
    return value.to_local() if all(place == Replicate() for place in value.placements) else value.full_tensor()


def _forward(named: _Named) -> tuple[Tensor, ...]:
    placed = _Placed(named)
    empty = torch.empty(0, dtype=torch.int64)
    if takes_part(placed.mesh):
        local = placed.arguments()
        out, row_max, row_sum, seed, _, _ = torch.ops.ringspan._contract_forward(**local)
    else:
        local, out, seed = named, placed.local("query", placed.axes), empty
        row_max = row_sum = torch.empty(0)
    roles, stats = placed.roles, axes_of_stats(placed.layout)
    slots = [*stats_shape(placed.sizes, placed.layout), _SLOTS]
    return (
        wrap(out, out_shape(named["query"].shape, placed.sizes, placed.layout), roles, placed.axes),
        wrap(row_max, slots, roles, stats),
        wrap(row_sum, slots, roles, stats),
        wrap(seed, [1], roles, {}),
        empty if local["q_map"] is None else local["q_map"],
        empty if local["kv_map"] is None else local["kv_map"],
    )


def _backward(named: _Named) -> tuple[Tensor, ...]:
    placed = _Placed(named, is_backward=True)
    if not takes_part(placed.mesh):
        return tuple(named[name] for name in ("query", "key", "value", "query", "query"))
    local = placed.arguments()
    for name, axes in (("dy", placed.axes), ("attention_in", placed.axes)):
        local[name] = placed.local(name, axes)
    for name in ("softmax_max", "softmax_sum"):
        local[name] = placed.local(name, axes_of_stats(placed.layout))
    dq, dk, dv, dpse, dsink = torch.ops.ringspan._contract_backward(**local)
    roles = placed.roles
    results = [
        wrap_gradient(gradient, named[name].shape, roles, placed.axes)
        for name, gradient in (("query", dq), ("key", dk), ("value", dv))
    ]
    for name, gradient in (("pse", dpse), ("sink", dsink)):
        shape = gradient.shape if named[name] is None else named[name].shape
        if named[name] is not None and gradient.numel():
            results.append(wrap_gradient(gradient, shape, roles, placed.given_axes[name]))
        else:
            results.append(wrap(gradient, shape, roles, {}))
    return tuple(results)


def _rule(op: Any, run: Callable[[_Named], tuple[Tensor, ...]]) -> None:
    """Registers `run` as DTensor's rule of `op`; the contract's errors are RuntimeErrors."""
    names = [argument.name for argument in op._schema.arguments]

    def rule(cls: type, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None) -> Any:
        named = dict(zip(names, args, strict=False))
        if kwargs:
            named |= kwargs
        if named["in_group"]:
            raise RuntimeError(
                "the .cp overloads take this rank's local tensors, not DTensors; call fusion_attention without them"
            )
        try:
            return run(named)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    torch.library.register_torch_dispatch(op, DTensor, rule)


def register() -> None:
    """Teaches DTensor both ops. Once for each process."""
    ops = torch.ops.ringspan
    _rule(ops._contract_forward.default, _forward)
    _rule(ops._contract_backward.default, _backward)

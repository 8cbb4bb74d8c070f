"""The contract's ops on DTensors: rules for the two opaque ops behind every version of fusion_attention.

Each unwraps, redistributes where placements are none that the op can take, runs the op on the local tensors (in the
group that shares out the sequence, if there is one), and wraps. Autograd runs above, in C++, and carries statistics,
seed and the chosen maps from the forward to the backward as it does for plain tensors.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ringspan.call import AXES
from ringspan.dtensor.arrangement import OPERANDS, Sharding, arrange, sharding_of
from ringspan.dtensor.operands import as_dtensor, common_mesh, in_place, map_of, takes_part
from ringspan.dtensor.peers import tell_group_of
from ringspan.dtensor.placements import Role, axes_beside
from ringspan.dtensor.private import local_of
from ringspan.dtensor.split import check_traceable, split_in_effect
from ringspan.entry import Telling
from ringspan.group import LOCAL, group_of

_FIRST_COMPRESSED_MODE = 2  # from here on a mask says nothing that a rank could have a part of
_SLOPES = 2  # pse_type from here on: slopes instead of a bias
_MASKS = ("pse", "atten_mask", "sink")
_STATISTICS = ("softmax_max", "softmax_sum")
_KEPT = (*_STATISTICS, "attention_in")  # this rank's parts already, where a forward on DTensors kept them
_RESULTS = ("dy", *_KEPT)  # what a backward has beside the arguments of its forward
_SMALL = ("seed", "offset", "actual_seq_qlen", "actual_seq_kvlen")


def _arguments_of(op: Any) -> type:
    """The arguments of an op by name, with its defaults."""
    arguments = op._schema.arguments
    return namedtuple(
        op._schema.name.split("::")[1],
        [argument.name for argument in arguments],
        defaults=[argument.default_value for argument in arguments if argument.has_default_value()],
    )


class _Placed:
    """One call on DTensors: how it is arranged on the mesh, and the op's arguments on local tensors."""

    def __init__(self, given: Any, results: Sequence[str] = ()) -> None:
        self.given, self.is_backward = given, bool(results)
        named = self.named = {name: getattr(given, name) for name in (*OPERANDS, *_MASKS, *results)}
        self.mesh = common_mesh(named)
        query, key, value = (as_dtensor(name, named[name], self.mesh) for name in OPERANDS)
        layout = given.input_layout.upper()
        self.arrangement = arrange(query, key, value, layout, _checked_heads(given, layout))
        self.shardings = self.arrangement.operands.copy()
        for name in _MASKS:
            if named[name] is not None:
                self.shardings[name] = self._sharding_of_mask(name, named[name])
        for name in results:
            is_part = name in _KEPT and given.are_parts
            if named[name] is not None and not is_part:
                self.shardings[name] = self.arrangement.slots if name in _STATISTICS else self.arrangement.out

    def _sharding_of_mask(self, name: str, tensor: Tensor) -> Sharding:
        axes = axes_beside(name, tensor, name == "pse" and self.given.pse_type >= _SLOPES)
        if name == "atten_mask" and self.given.sparse_mode >= _FIRST_COMPRESSED_MODE:
            axes = {}
        return sharding_of(self.arrangement.roles, axes, tensor.shape, tensor.dtype)

    def local(self, name: str) -> Tensor:
        """This rank's part of an argument. What the forward took plain, its backward takes plain."""
        was_accepted = self.is_backward and name in _MASKS
        return local_of(in_place(name, self.named[name], self.shardings[name], was_accepted))

    def arguments(self) -> Any:
        """All arguments of the op for this rank."""
        given, roles = self.given, self.arrangement.roles
        changed: dict[str, Any] = {name: self.local(name) for name in self.shardings}
        for name in _SMALL:
            small = getattr(given, name)
            if isinstance(small, DTensor):
                changed[name] = _whole(small)
        changed["head_num"] = given.head_num // roles.parts[Role.HEADS]
        changed["batch_groups"] = roles.group_names(Role.BATCH)
        changed["head_groups"] = roles.group_names(Role.HEADS)
        group = roles.sequence_group()
        if group is not None:
            changed["in_group"], changed["group_name"] = True, group.group_name
            self._fill_maps(changed, roles.parts[Role.SEQUENCE])
        return given._replace(**changed)

    def _fill_maps(self, changed: dict[str, Any], world: int) -> None:
        """A backward finds the forward's maps in its arguments."""
        split, sizes = check_traceable(split_in_effect()), self.arrangement.sizes
        changed["exchange"] = split.exchange
        for name, rows in (("q_map", sizes.q_rows), ("kv_map", sizes.kv_rows)):
            if getattr(self.given, name) is None and not (split.is_contiguous and rows % world == 0):
                changed[name] = map_of(split.make_map, rows, world).to_tensor()


def _checked_heads(given: Any, layout: str) -> int | None:
    """The number of query heads where the layout does not show it. ValueError where head_num does not fit query."""
    if layout not in AXES:
        raise ValueError(f"input_layout is {given.input_layout!r}; give one of {', '.join(AXES)}")
    shape, heads_axis = given.query.shape, AXES[layout][1]
    if given.head_num < 1:
        raise ValueError(f"head_num is {given.head_num}; give the number of query heads")
    if len(shape) != len(layout):
        return None  # the arrangement says so
    if heads_axis is not None and shape[heads_axis] != given.head_num:
        raise ValueError(f"head_num is {given.head_num}, but query has {shape[heads_axis]} heads in layout {layout}")
    if heads_axis is None and shape[2] % given.head_num != 0:
        raise ValueError(f"query has a hidden size of {shape[2]}, which head_num {given.head_num} does not divide")
    return given.head_num if heads_axis is None else None


def _telling(given: Any) -> Telling:
    """Around the op and what follows it: the op tells its peers of its own errors."""
    return Telling(group_of(given.group_name) if given.in_group else LOCAL)


def _whole(small: DTensor) -> Tensor:
    """Seeds and lengths, which may come as DTensors."""
    return local_of(small) if all(one == Replicate() for one in small.placements) else small.full_tensor()


def _forward(op: Any, given: Any) -> tuple[Any, ...]:
    placed = _Placed(given)
    empty = torch.empty(0, dtype=torch.int64)
    if not takes_part(placed.mesh):
        none = torch.empty(0)
        return _wrapped(placed, (placed.local("query"), none, none, none, empty, empty), [])
    given = placed.arguments()
    with _telling(given):
        *results, _ = op(*given)
        kept = [*results[:3], *(empty if chosen is None else chosen for chosen in (given.q_map, given.kv_map))]
        return _wrapped(placed, results, kept)


def _wrapped(placed: _Placed, results: Sequence[Tensor], kept: list[Tensor]) -> tuple[Any, ...]:
    lies = placed.arrangement
    shardings = (lies.out, lies.slots, lies.slots, lies.nothing, lies.seed, lies.seed)
    return (*(sharding.wrap(local) for sharding, local in zip(shardings, results, strict=True)), kept)


def _backward(op: Any, given: Any) -> tuple[Tensor, ...]:
    placed = _Placed(given, _RESULTS)
    if not takes_part(placed.mesh):
        return given.query, given.key, given.value, given.query, given.query
    shardings, nothing = placed.shardings, placed.arrangement.nothing
    local = placed.arguments()
    with _telling(local):
        *gradients, dpse, dsink = op(*local)
        results = [shardings[name].wrap_gradient(gradient) for name, gradient in zip(OPERANDS, gradients, strict=True)]
        for name, gradient in (("pse", dpse), ("sink", dsink)):
            is_part = name in shardings and gradient.numel()
            results.append(shardings[name].wrap_gradient(gradient) if is_part else nothing.wrap(gradient))
    return tuple(results)


def _rule(op: Any, run: Callable[[Any, Any], tuple[Any, ...]]) -> None:
    """Registers `run` as DTensor's rule of `op`; the contract's errors are RuntimeErrors."""
    arguments = _arguments_of(op)

    def rule(cls: type, func: Any, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None) -> Any:
        given = arguments(*args, **(kwargs or {}))
        if given.in_group:
            raise RuntimeError(
                "the .cp overloads take this rank's local tensors, not DTensors; call fusion_attention without them"
            )
        try:
            return run(op, given)
        except BaseException as error:
            tell_group_of(error, (given.query, given.key, given.value), given.input_layout.upper(), given.head_num)
            if isinstance(error, ValueError):
                raise RuntimeError(str(error)) from error
            raise

    torch.library.register_torch_dispatch(op, DTensor, rule)


def register() -> None:
    """Teaches DTensor both ops. Once for each process."""
    ops = torch.ops.ringspan
    _rule(ops._contract_forward.default, _forward)
    _rule(ops._contract_backward.default, _backward)

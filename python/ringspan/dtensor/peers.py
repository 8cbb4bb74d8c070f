"""Whom an exception on DTensors is told: the ranks that would have shared out the sequence in that call.

The group follows from how query, key and value lie (arrangement.py). Where these do not fit together it is guessed: the
first mesh axis that cuts the rows of the query, else of key or value. Where no axis cuts the rows, nobody is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from ringspan.call import AXES
from ringspan.dtensor.arrangement import OPERANDS, arrange
from ringspan.entry import take_mark, tell

# Layouts by number of dimensions, those first whose rows are tried first.
_LAYOUTS = {4: ("BNSD", "BSND"), 3: ("BSH", "SBH"), 2: ()}


def tell_sequence_group(error: BaseException, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tells the peers of a call with these arguments, whose first three are query, key and value, of `error`."""
    given = dict(zip(OPERANDS, args, strict=False)) | dict(kwargs)
    named = [given.get(name) for name in OPERANDS]
    tell_group_of(error, named, given.get("layout", "BNSD"), given.get("num_heads"))


def tell_group_of(error: BaseException, operands: Sequence[Any], layout: Any, num_heads: Any) -> None:
    """Tells the group that shares out the sequence of query, key and value, unless it was told already."""
    # An error must not be lost because something in the call is worse than it says.
    with contextlib.suppress(Exception):
        if take_mark(error):
            return
        group = _group_of_call(operands, layout, num_heads)
        if group is not None:
            tell(error, group)


def _group_of_call(operands: Sequence[Any], layout: Any, num_heads: Any) -> ProcessGroup | None:
    for heads in (num_heads, None):
        with contextlib.suppress(Exception):
            query, key, value = operands
            return arrange(query, key, value, layout, heads).roles.sequence_group()
    return _guessed_group([one for one in operands if isinstance(one, DTensor)], layout)


def _guessed_group(operands: Sequence[DTensor], layout: Any) -> ProcessGroup | None:
    for name in (layout,) if layout in AXES else _LAYOUTS.get(operands[0].dim(), ()):
        rows = Shard(AXES[name][2])
        for tensor in operands:
            if rows in tensor.placements:
                return operands[0].device_mesh.get_group(tensor.placements.index(rows))
    return None

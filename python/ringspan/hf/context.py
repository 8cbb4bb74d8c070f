"""`context_parallel`: which group holds a model's sequence, and which of its tokens this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.entry import Telling, enters
from ringspan.group import LOCAL, Group, name_and_world, rank_in, world_mismatch
from ringspan.hf.inputs import check_call, gather
from ringspan.hf.models import check_model, find_model
from ringspan.masks import int64_table
from ringspan.shard_map import ShardMap


@dataclass
class Forward:
    """One forward of the model. Its masks hold it, so that backward can compute a layer again at any time.

    padding: bool [B, whole sequence], False is padding, None where there is none. documents: lengths [1 or B, n].
    counts_from_zero: position_ids begin at 0. calls: attention calls so far.
    """

    group: Group
    shard_map: ShardMap
    rows: int
    documents: Tensor | None
    padding: Tensor | None
    counts_from_zero: bool
    calls: int = 0


@dataclass(eq=False)
class _Context:
    """One `with`. `outer` is what held before it; those that were left are skipped, in whatever order."""

    model: torch.nn.Module
    group: Group
    rank: int
    shard_map: ShardMap
    documents: Tensor | None
    outer: _Context | None = None
    is_open: bool = True
    forward: Forward | None = None


_INNERMOST: ContextVar[_Context | None] = ContextVar("ringspan.hf.context_parallel", default=None)


def _active() -> _Context | None:
    context = _INNERMOST.get()
    while context is not None and not context.is_open:
        context = context.outer
    return context


def current_forward() -> Forward | None:
    """The forward that runs under `context_parallel`, None outside of it.

    ValueError inside of it, but in another model than the one it was given.
    """
    context = _active()
    if context is None:
        return None
    if context.forward is None:
        raise ValueError(
            "a model that was not given to the innermost context_parallel was called inside of it; call it outside, or "
            "in a context of its own"
        )
    return context.forward


def group_here() -> Group:
    """The group of the innermost open `context_parallel`, that of this process alone outside of any."""
    context = _active()
    return LOCAL if context is None else context.group


@enters()
def context_parallel(
    model: torch.nn.Module,
    *,
    group: Group,
    shard_map: ShardMap,
    documents: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    assume_token_wise: bool = False,
) -> AbstractContextManager[None]:
    """Inside, `model` is called with this rank's tokens, and its attention goes over those of all ranks of `group`.

    model: a transformers model with `attn_implementation="ringspan"`, or a module around one (DDP, PEFT). It is called
        with input_ids [B, S] or inputs_embeds [B, S, H], where S are this rank's rows of `shard_map`; with
        position_ids [1 or B, S], those of the whole sequence (`shard_map.positions(rank)`) or, counted in each of the
        `documents`, theirs; and, where there is padding, with attention_mask [B, S], 0 or False for padding.
    documents: lengths of packed documents, [n] or [B, n], of the whole sequence. What follows the last is padding.
    assume_token_wise: for a model type outside `CHECKED_MODELS`. You vouch that, attention aside, it treats each token
        by itself, and takes positions from position_ids alone.

    Contexts nest: the innermost holds, for its own model. Backward may run inside or outside. Each forward gathers
    position_ids and attention_mask (one small collective) and checks them.

    Raises ValueError for arguments that do not fit and NotImplementedError for models and arguments of theirs that are
    not offered under context parallelism (docs/transformers.md), before anything is sent and on every rank.
    """
    _, world = name_and_world(group)
    if group is None:
        torch.ops.ringspan._check_alone("context_parallel")
    found = find_model(model)
    check_model(found, assume_token_wise)
    if not isinstance(shard_map, ShardMap):
        raise ValueError(f"shard_map is of {type(shard_map).__name__}; give a ShardMap")
    if shard_map.world_size != world:
        raise world_mismatch("shard_map", shard_map.world_size, group, world)
    rows = [shard_map.local_rows(rank) for rank in range(world)]
    if 0 in rows:
        raise ValueError(
            f"rank {rows.index(0)} holds no token of the {shard_map.seq_len} in the map; models cannot be called "
            "with none: give every rank some, or fewer ranks"
        )
    return _open(_Context(found, group, rank_in(group), shard_map, _lengths(documents, shard_map.seq_len)))


@contextmanager
def _open(context: _Context) -> Iterator[None]:
    context.outer = _active()
    _INNERMOST.set(context)
    hooks = [
        context.model.register_forward_pre_hook(
            lambda _, args, kwargs: _begin(context, args, kwargs), with_kwargs=True
        ),
        context.model.register_forward_hook(lambda _, args, output: _end(context, output), always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        context.is_open = False
        _INNERMOST.set(_active())


@torch.compiler.disable
def _begin(context: _Context, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Before a forward: checks what the model is called with, and gathers what all ranks have to know."""
    active = _active()
    if active is not context and active is not None:
        return args, kwargs  # the inner context has hooks of its own, and no mask is made without them
    with Telling(context.group):
        if active is None:
            raise ValueError(
                "context_parallel was entered in another thread or task; enter it where the model is called"
            )
        smap = context.shard_map
        rows = smap.local_rows(context.rank)
        args, kwargs, local = check_call(context.model, args, kwargs, rows, context.documents)
        padding, from_zero = gather(local, smap, context.group, context.documents)
    context.forward = Forward(context.group, smap, rows, context.documents, padding, from_zero)
    return args, kwargs


@torch.compiler.disable
def _end(context: _Context, output: Any) -> None:
    """After a forward, also after one that raised (then without output)."""
    forward, context.forward = context.forward, None
    if output is None or forward is None:
        return
    config: Any = context.model.config
    expected = config.num_hidden_layers
    if forward.calls != expected:
        raise NotImplementedError(
            f"{type(context.model).__name__} has {expected} layers and made {forward.calls} attention calls; layers "
            "that mix tokens in another way see only this rank's, so context parallelism is refused"
        )


def _lengths(documents: Any, seq_len: int) -> Tensor | None:
    """int64 [1 or B, n]."""
    if documents is None:
        return None
    table = int64_table("context_parallel(documents)", documents, fill=0)
    table = table[None] if table.dim() == 1 else table
    if table.dim() != 2 or table.numel() == 0 or bool((table < 0).any()) or bool((table.sum(dim=1) > seq_len).any()):
        raise ValueError(
            f"context_parallel(documents={table.tolist()}): give lengths [n] or [B, n], whose sum is at most the "
            f"{seq_len} positions of the map"
        )
    return table

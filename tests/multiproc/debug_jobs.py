"""Jobs of the pool under RINGSPAN_DEBUG=1, and of what it finds without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from trials import Told
from waiting_jobs import DIM, HEADS, KV_HEADS, ROWS, Attention, environment, warm_arena

import ringspan as rs


def debugged(on: bool) -> Any:
    return environment(RINGSPAN_DEBUG="1" if on else None)


# Three places that make calls of equal arguments.
def first(call: Attention) -> None:
    call.forward_at = rs.attention(*call.leaves, shard_map=call.smap, group=call.group)


def second(call: Attention) -> None:
    call.forward_at = rs.attention(*call.leaves, shard_map=call.smap, group=call.group)


def first_unshard(call: Attention) -> None:
    call.smap.unshard(torch.ones(ROWS, 3), group=call.group, dim=0)


def second_unshard(call: Attention) -> None:
    call.smap.unshard(torch.ones(ROWS, 3), group=call.group, dim=0)


PLACES: dict[str, tuple[Callable[[Attention], None], ...]] = {
    "attention": (first, second),
    "unshard": (first_unshard, second_unshard),
}


def out_of_step(group: dist.ProcessGroup, fresh: list, what: str, way: str, debug: bool) -> tuple[Told, float]:
    """Rank 1 skips the first of two calls, or makes them in the other order. The largest error of what was returned."""
    arena = warm_arena(group, fresh)
    calls = [Attention(arena.group, seed) for seed in (1, 2)]
    pairs = list(zip(PLACES[what], calls, strict=True))
    if arena.rank == 1:
        pairs = pairs[::-1] if way == "swapped" else [pairs[1], pairs[1]]

    def act() -> None:
        with debugged(debug):
            for make, call in pairs:
                make(call)

    told = arena.trial(act)
    for call in calls:
        call.out = getattr(call, "forward_at", None)
    return told, max([call.error() for call in calls if call.out is not None], default=0.0)


def on_one_rank(group: dist.ProcessGroup, fresh: list, kinds: list[str]) -> dict[str, Told]:
    """Only rank 1 is debugged."""
    arena = warm_arena(group, fresh)
    found = {}
    for kind in kinds:
        call = Attention(arena.group)
        if kind == "backward":
            call.forward()
        make = {"forward": call.forward, "backward": call.backward, "unshard": functools.partial(first_unshard, call)}

        def act(make: Callable[[], Any] = make[kind]) -> None:
            with debugged(arena.rank == 1):
                make()

        found[kind] = arena.trial(act)
    return found


def good_calls(group: dist.ProcessGroup, fresh: dist.ProcessGroup) -> list[float]:
    """Calls of every kind that all ranks make at one place. Errors."""
    with debugged(True):
        calls = [Attention(fresh, seed) for seed in range(3)]
        calls[0].forward()
        calls[0].backward()
        again = functools.partial(rs.attention, shard_map=calls[1].smap, group=fresh)
        calls[1].out = checkpoint(again, *calls[1].leaves, use_reentrant=False)
        calls[1].backward()
        x = torch.ones(ROWS, 3, requires_grad=True)
        calls[0].smap.unshard(x, group=fresh, dim=0, grad="sum").sum().backward()
        rs.masked_mean_loss(torch.ones(3), torch.ones(3, dtype=torch.bool), group=fresh)
        # Rank 0 has no place: it compares with nothing, and the others go on comparing theirs.
        torch._dynamo.reset()
        if dist.get_rank(fresh) == 0:
            again = torch.compile(again, backend="aot_eager")
        calls[2].out = again(*calls[2].leaves)
        calls[2].backward()
    return [call.error() for call in calls]


def compiled_beside_two_places(group: dist.ProcessGroup, fresh: list) -> Told:
    """Rank 0 runs compiled code; the others are at two places."""
    arena = warm_arena(group, fresh)
    call = Attention(arena.group)
    torch._dynamo.reset()
    plain = functools.partial(rs.attention, shard_map=call.smap, group=arena.group)
    run = torch.compile(plain, backend="aot_eager")
    make = (lambda: run(*call.leaves), lambda: first(call), lambda: second(call))[arena.rank]

    def act() -> None:
        with debugged(True):
            make()

    return arena.trial(act)


def _on_mesh(x: torch.Tensor, mesh: DeviceMesh, placement: Any) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _attend(
    front: str, group: dist.ProcessGroup, call: Attention, pairs: dict[str, torch.Tensor], schedule: str
) -> Any:
    """One call with a mask or bias of one row, by its name."""
    if front == "attention":
        return rs.attention(*call.leaves, shard_map=call.smap, group=group, schedule=schedule, **pairs)
    if front == "DTensors":
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        leaves = [_on_mesh(x, mesh, Shard(2)) for x in call.leaves]
        return rs.attention(*leaves, **{name: _on_mesh(x, mesh, Replicate()) for name, x in pairs.items()})
    leaves, names = [x.detach() for x in call.leaves], {"bias": "pse"}
    given = {"head_num": HEADS, "input_layout": "BNSD", "scale": DIM**-0.5}
    pairs = {names[name]: x for name, x in pairs.items()}
    return torch.ops.ringspan.fusion_attention_v3.cp(*leaves, **given, group_name=group.group_name, **pairs)


def row_of(what: str, columns: int, odd: bool) -> dict[str, torch.Tensor]:
    """A tensor of pairs with one row; an odd rank has another number in its last column."""
    if what == "bool attn_mask":
        row = torch.ones(1, 1, 1, columns, dtype=torch.bool)
        row[..., 1], row[..., -1] = False, odd
        return {"attn_mask": row}
    row = torch.linspace(-1.0, 1.0, columns).reshape(1, 1, 1, columns)
    row[..., -1] += float(odd)
    if what == "a single axis":
        return {"attn_mask": row.flatten()}
    if what == "bias of heads":
        return {"bias": row.expand(1, HEADS, 1, columns).contiguous()}
    return {"attn_mask" if what == "float attn_mask" else "bias": row}


def other_content(
    group: dist.ProcessGroup, fresh: list, front: str, whats: list[str], schedule: str, debug: bool
) -> dict[str, Told]:
    """Rank 1 has another number in a row that all queries of all ranks share."""
    arena = warm_arena(group, fresh)
    found = {}
    for what in whats:
        if arena.is_used_up:
            break
        call = Attention(arena.group)
        pairs = row_of(what, ROWS * arena.world, arena.rank == 1)

        def act(call: Attention = call, pairs: dict = pairs) -> None:
            with debugged(debug):
                _attend(front, arena.group, call, pairs, schedule)

        found[what] = arena.trial(act)
    return found


def content_on_few_rows(
    group: dist.ProcessGroup, fresh: list, lengths: list[int], what: str, schedule: str, odd: int | None
) -> tuple[Told, float]:
    """Ranks hold `lengths` rows. One whose number is `odd` has other content. The error of the result."""
    arena = warm_arena(group, fresh)
    length, rank = sum(lengths), arena.rank
    smap = rs.ShardMap.from_lengths(lengths)
    q, k, v, _ = oracle.draw(7, length, HEADS, KV_HEADS, DIM)
    pairs = {name: x.double() if x.is_floating_point() else x for name, x in row_of(what, length, rank == odd).items()}
    (shared,) = row_of(what, length, False).values()
    numbers = shared.double().numpy().reshape(1, 1, 1, length)
    keep = oracle.keep_of(("full",), length, length)
    if shared.dtype == torch.bool:
        right = oracle.attend(q, k, v, keep & (numbers[0] > 0)).out
    else:
        right = oracle.attend(q, k, v, keep, bias=np.broadcast_to(numbers, (1, HEADS, length, length))).out
    local = [smap.shard(torch.from_numpy(x), rank, 2) for x in (q, k, v)]
    outs = []

    def act() -> None:
        with debugged(True):
            outs.append(rs.attention(*local, shard_map=smap, group=arena.group, schedule=schedule, **pairs))

    told = arena.trial(act)
    mine = smap.positions(rank).numpy()
    return told, oracle.error(outs[0].numpy(), right[:, :, mine], right) if outs and len(mine) else 0.0

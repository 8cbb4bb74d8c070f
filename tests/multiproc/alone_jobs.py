"""Jobs of the pool about calls without a group in a job of several processes, and about the map that was forgotten."""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings
from collections.abc import Callable
from typing import Any

import oracle
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, Dataset
from trials import Arena, Told

import ringspan as rs


def told(call: Callable[[], Any]) -> str:
    """What is raised, and "nothing" for nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def without_a_group(group: dist.ProcessGroup) -> dict[str, str]:
    """Every front with group=None beside a default group of several ranks."""
    x = torch.ones(1, 2, 4, 8)
    smap = rs.ShardMap.contiguous(4, 1)
    from ringspan import flex

    compiled = torch.compile(lambda x: rs.attention(x, x, x), fullgraph=True, backend="aot_eager")
    losses, valid = torch.ones(3), torch.ones(3, dtype=torch.bool)
    return {
        "attention": told(lambda: rs.attention(x, x, x)),
        "attention, None": told(lambda: rs.attention(x, x, x, group=None)),
        "with a map": told(lambda: rs.attention(x, x, x, shard_map=smap)),
        "compiled": told(lambda: compiled(x)),
        "flex": told(lambda: flex.flex_attention(x, x, x)),
        "unshard": told(lambda: smap.unshard(x, dim=2)),
        "loss": told(lambda: rs.masked_mean_loss(losses, valid)),
    }


def model_without_a_group(group: dist.ProcessGroup) -> str:
    """transformers' context with group=None."""
    import hf_models

    model = hf_models.pair_of("llama")[1]

    def call() -> None:
        with rs.hf.context_parallel(model, group=None, shard_map=rs.ShardMap.contiguous(4, 1)):
            model(input_ids=hf_models.tokens(1, 4), position_ids=torch.arange(4)[None])

    return told(call)


def on_purpose_alone(group: dist.ProcessGroup) -> dict[str, float]:
    """rs.LOCAL, and groups and meshes of one rank: the error of each front."""
    leaves, right = _whole()
    single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = DeviceMesh.from_group(single, "cpu", mesh_dim_names=("cp",))
    smap = rs.ShardMap.contiguous(6, 1)
    from ringspan import flex

    def off(out: torch.Tensor) -> float:
        return oracle.error(out.detach().numpy(), right.numpy())

    compiled = torch.compile(
        lambda *x: rs.attention(*x, mask=rs.causal(), group=rs.LOCAL), fullgraph=True, backend="aot_eager"
    )
    found = {"compiled": off(compiled(*leaves))}
    for name, alone in {"LOCAL": rs.LOCAL, "group": single, "mesh": mesh}.items():
        found[f"attention, {name}"] = off(rs.attention(*leaves, mask=rs.causal(), group=alone))
        found[f"with a map, {name}"] = off(rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=alone))
        found[f"flex, {name}"] = off(flex.flex_attention(*leaves, None, rs.causal(), enable_gqa=True, group=alone))
        found[f"unshard, {name}"] = off(smap.unshard(right, dim=2, group=alone))
        loss, _ = rs.masked_mean_loss(torch.tensor([1.0, 3.0]), torch.tensor([True, True]), group=alone)
        found[f"loss, {name}"] = abs(float(loss) - 2)
    found["heads over ranks"] = _heads_over_ranks(group, leaves, right)
    return found


def _whole() -> tuple[list[torch.Tensor], torch.Tensor]:
    q, k, v, _ = oracle.draw(2, 6, 4, 2, 8)
    right = oracle.attend(q, k, v, oracle.keep_of(("causal",), 6, 6)).out
    return [torch.from_numpy(x) for x in (q, k, v)], torch.from_numpy(right)


def _heads_over_ranks(group: dist.ProcessGroup, leaves: list, right: torch.Tensor) -> float:
    """Tensor parallelism alone: plain tensors of this rank's heads with LOCAL, and DTensors, whose mesh says it."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if 2 % world:
        return 0.0
    heads = [x.chunk(world, 1)[rank].contiguous() for x in leaves]
    out = rs.attention(*heads, mask=rs.causal(), group=rs.LOCAL)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    placed = [DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in heads]
    on_mesh = rs.attention(*placed, mask=rs.causal()).to_local()
    mine = right.chunk(world, 1)[rank].numpy()
    return max(oracle.error(out.numpy(), mine), oracle.error(on_mesh.numpy(), mine))


class Attending(Dataset):
    """Attention where data are loaded: in a worker process."""

    def __init__(self, alone: Any) -> None:
        self.alone = alone

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list:
        leaves, right = _whole()
        given = {} if self.alone is None else {"group": self.alone}
        text = "nothing"
        error = float("inf")
        try:
            error = oracle.error(rs.attention(*leaves, mask=rs.causal(), **given).numpy(), right.numpy())
        except ValueError as refusal:
            text = str(refusal)
        return [error, text]


def in_a_worker(group: dist.ProcessGroup, start: str) -> dict[str, list]:
    """What a DataLoader's worker gets, with LOCAL and without a group."""
    # The pool's processes are daemons, which may have no children; these end before this function does.
    multiprocessing.current_process()._config["daemon"] = False
    os.environ.update(RANK=str(dist.get_rank(group)), WORLD_SIZE=str(dist.get_world_size(group)))
    try:
        found = {}
        for name, alone in {"LOCAL": rs.LOCAL, "None": None}.items():
            loader = DataLoader(Attending(alone), batch_size=None, num_workers=1, multiprocessing_context=start)
            found[name] = list(loader)
        return found
    finally:
        multiprocessing.current_process()._config["daemon"] = True
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


def forgotten_map(group: dist.ProcessGroup) -> dict[str, int]:
    """How often a process is warned: with a map, on DTensors, alone; then without a map, twice."""
    world = dist.get_world_size(group)
    rows = 64
    x = torch.ones(1, 1, rows, 8)
    longer = torch.ones(1, 1, rows + 16, 8)  # a plan that was made once is not looked at again
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    placed = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    length = rows * world

    def attend(**given: Any) -> None:
        rs.attention(x, x, x, **{"mask": rs.causal(), "group": group, **given})

    calls: dict[str, Callable[[], Any]] = {
        "contiguous": lambda: attend(shard_map=rs.ShardMap.contiguous(length, world)),
        "head_tail": lambda: attend(shard_map=rs.ShardMap.head_tail(length, world)),
        "DTensors": lambda: rs.attention(placed, placed, placed, mask=rs.causal()),
        "balanced anyway": lambda: attend(mask=rs.full()),
        "alone": lambda: attend(group=rs.LOCAL),
        "forgotten": lambda: rs.attention(longer, longer, longer, mask=rs.causal(), group=group),
        "again": lambda: rs.attention(longer, longer, longer, mask=rs.causal(), group=group),
        "another": lambda: attend(mask=rs.window(7 * rows)),
    }
    found = {}
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
        found[name] = sum("shard_map" in str(one.message) for one in seen)
    return found


def wrong_instruction_set(group: dist.ProcessGroup, fresh: list) -> Told:
    """The first call of a process whose RINGSPAN_ISA names none, on the last rank."""
    arena = Arena(group, fresh)
    if arena.rank == arena.world - 1:
        os.environ["RINGSPAN_ISA"] = "no-such-set"
    x = torch.ones(1, 1, 4, 8)
    return arena.trial(functools.partial(rs.attention, x, x, x, group=arena.group))

"""What one run is asked for: options, checked one by one, and the sizes that follow from them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.names import AUTO, DTYPES, SCHEDULES, SPLIT_SCHEDULES

MODES = ("cp_attention",)
MASKS = ("full", "causal")
SHARDS = ("contiguous", "head_tail")
BACKENDS = ("auto", "gloo", "nccl")
# Schedule and exchange of what every run measures.
ALWAYS = (("ring", "all_to_all"), ("ring", "p2p"), ("gather", "all_gather"))
SCHEDULE_EXCHANGE = "all_to_all"  # of those that are asked for
BATCH = 1
_MAX_TEXT = 200  # characters of a label; it also has to fit into a table


@dataclass(frozen=True)
class Config:
    """One run. `rank` and `world` come from torchrun, or are 0 and `--world` where it did not start this process."""

    mode: str
    seq_len: int
    num_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    mask: str
    shard: str
    backward: bool
    warmup: int
    repeats: int
    run_label: str
    workload_id: str
    output: Path
    dry_run: bool
    force: bool
    backend: str
    schedules: tuple[str, ...]
    timeout_s: float
    seed: int
    rank: int
    world: int
    local_rank: int
    local_world: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of query, key and value."""
        return getattr(torch, self.dtype)

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype in which gradients of K and V are added up over ranks."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def mask_of_call(self) -> rs.Mask:
        """The mask as `rs.attention` takes it."""
        return rs.causal() if self.mask == "causal" else rs.full()

    def shard_map(self) -> rs.ShardMap:
        """Who holds which positions, of queries and of K and V."""
        return getattr(rs.ShardMap, self.shard)(self.seq_len, self.world)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Whole query, key and value, layout BNSD."""
        kv = (BATCH, self.kv_heads, self.seq_len, self.head_dim)
        return (BATCH, self.num_heads, self.seq_len, self.head_dim), kv, kv

    def plan(self, schedule: str, exchange: str) -> rs.Plan:
        """What `rs.attention` will do with this schedule and exchange."""
        options: dict[str, Any] = {
            "mask": self.mask_of_call,
            "shard_map": self.shard_map(),
            "world_size": self.world,
        }
        return rs.plan(*self.shapes(), dtype=self.torch_dtype, exchange=exchange, schedule=schedule, **options)

    def choices(self) -> list[tuple[str, str]]:
        """Schedule and exchange of every path of `rs.attention` over the group."""
        return [*ALWAYS, *((schedule, SCHEDULE_EXCHANGE) for schedule in self.schedules)]

    def shared(self) -> dict[str, object]:
        """What must be the same on every rank."""
        own = {"rank", "local_rank", "local_world"}
        return {name: str(value) for name, value in vars(self).items() if name not in own}


def parse(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Config:
    """Reads the options and torchrun's variables. A bad one prints usage and both values, and exits with status 2."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return _complete(options, environment)
    except ValueError as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    """All options, with the defaults of the workload `par-context-kv-exchange`."""
    parser = argparse.ArgumentParser(
        prog="python -m ringspan.bench",
        description="Checks and times attention over a sequence that is split over ranks, and writes one JSON file.",
        epilog="Start it with torchrun --standalone --nproc_per_node P -m ringspan.bench ... for P ranks.",
    )
    add = parser.add_argument
    add("--mode", choices=MODES, default=MODES[0], help="what is measured (default: %(default)s)")
    add("--seq-len", type=int, default=2048, metavar="N", help="positions of the whole sequence (%(default)s)")
    add("--num-heads", type=int, default=8, metavar="N", help="query heads (%(default)s)")
    add("--kv-heads", type=int, metavar="N", help="heads of K and V (default: as --num-heads)")
    add("--head-dim", type=int, default=64, metavar="N", help="numbers per head (%(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of query, key and value (%(default)s)")
    add("--mask", choices=MASKS, default="full", help="which pairs take part (%(default)s)")
    # The command line's verbs know head_tail by another word too.
    shard = {"zigzag": "head_tail"}
    add(
        "--shard",
        type=lambda name: shard.get(name, name),
        choices=SHARDS,
        default=SHARDS[0],
        help="who holds which positions (%(default)s)",
    )
    add("--backward", action="store_true", help="measure forward and backward together, not forward alone")
    add("--warmup", type=int, default=3, metavar="N", help="rounds before the clock counts (%(default)s)")
    add("--repeats", type=int, default=10, metavar="N", help="timed rounds; 0 checks results and bytes only")
    add("--run-label", default="default", metavar="TEXT", help="name of this run (%(default)s)")
    add("--workload-id", default="par-context-kv-exchange", metavar="TEXT", help="name of the workload (%(default)s)")
    add("--output", type=Path, required=True, metavar="FILE", help="the JSON file to write")
    add("--dry-run", action="store_true", help="check the configuration and run no attention")
    add("--force", action="store_true", help="replace a file of the same label")
    add("--backend", choices=BACKENDS, default="auto", help="auto: nccl where each rank has a CUDA device, else gloo")
    add("--world", type=int, metavar="P", help="ranks of a dry run that torchrun did not start (default 1)")
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds until a silent rank counts as lost")
    add(
        "--schedules",
        default="ring",
        metavar="NAMES",
        help="ring, and beside it: "
        + ", ".join([*SCHEDULES[2:], *(f"{kind}:N" for kind in SPLIT_SCHEDULES)])
        + ", or all that fit",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the random input (%(default)s)")
    return parser


def _complete(options: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    least = {"seq_len": 1, "num_heads": 1, "head_dim": 1, "warmup": 0, "repeats": 0, "seed": 0}
    least |= {name: 1 for name in ("kv_heads", "world") if getattr(options, name) is not None}
    for name, limit in least.items():
        if getattr(options, name) < limit:
            raise ValueError(f"{_flag(name)} is {getattr(options, name)}; give a whole number >= {limit}")
    if not 0 < options.timeout < float("inf"):
        raise ValueError(f"--timeout is {options.timeout}; give a number of seconds above 0")
    for name in ("run_label", "workload_id"):
        text = getattr(options, name)
        if not text.strip() or len(text) > _MAX_TEXT or not text.isprintable():
            raise ValueError(f"{_flag(name)} is {text!r}; give 1 to {_MAX_TEXT} printable characters")
    kv_heads = options.kv_heads or options.num_heads
    if options.num_heads % kv_heads:
        raise ValueError(f"--num-heads is {options.num_heads}, which --kv-heads {kv_heads} does not divide")
    place = _place(options, environment)
    given = {name: value for name, value in vars(options).items() if name not in ("timeout", "world")}
    backend = _backend(options.backend, place["local_world"])
    found = {"kv_heads": kv_heads, "backend": backend, "timeout_s": options.timeout}
    found["schedules"] = _schedules(options.schedules, place["world"])
    if found["schedules"] and backend == "nccl":
        raise ValueError(f"--schedules is {options.schedules}, but rs.attention is measured on CPUs, not by nccl")
    return Config(**{**given, **found, **place})


def schedules_of(world: int) -> tuple[str, ...]:
    """Every schedule that fits, beside the ring."""
    splits = [(inner, world // inner) for inner in range(2, world) if world % inner == 0]
    split_names = [f"{kind}:{inner}x{outer}" for inner, outer in splits for kind in SPLIT_SCHEDULES]
    return (*(name for name in SCHEDULES if name not in (AUTO, "ring")), *split_names)


def _in_full(name: str, world: int) -> str:
    """ "hybrid:2" of 8 ranks as "hybrid:2x4"; other names as they are."""
    kind, _, inner = name.partition(":")
    fits = kind in SPLIT_SCHEDULES and inner.isdecimal() and int(inner) > 0 and world % int(inner) == 0
    return f"{name}x{world // int(inner)}" if fits else name


def _schedules(given: str, world: int) -> tuple[str, ...]:
    """What `given` names beside the ring, which always runs, in the order of `schedules_of`."""
    fitting = ("ring", *schedules_of(world))
    names = fitting if given == "all" else [_in_full(name, world) for name in given.split(",")]
    for name in names:
        if name not in fitting:
            raise ValueError(
                f"--schedules is {given}, but {name!r} is no schedule of {world} ranks; give all, or some of "
                f"{', '.join(fitting)}"
            )
    return tuple(name for name in fitting[1:] if name in names)


def _place(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, int]:
    """rank, world, local_rank and local_world."""
    if "WORLD_SIZE" in environment:
        world = int(environment["WORLD_SIZE"])
        if options.world not in (None, world):
            raise ValueError(f"--world is {options.world}, but torchrun started {world} ranks; leave --world out")
        local = {"local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"}
        found = {name: int(environment[variable]) for name, variable in local.items() if variable in environment}
        rank = int(environment["RANK"])
        return {"rank": rank, "world": world, "local_rank": rank, "local_world": world} | found
    world = options.world or 1
    if world > 1 and not options.dry_run:
        raise ValueError(
            f"--world is {world}, but this is one process; start it with torchrun --standalone --nproc_per_node {world}"
        )
    return {"rank": 0, "world": world, "local_rank": 0, "local_world": world}


def _backend(given: str, local_world: int) -> str:
    devices = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    if given == "nccl" and devices < local_world:
        raise ValueError(f"--backend is nccl, which needs {local_world} CUDA devices here, but {devices} are usable")
    if given == "auto":
        return "nccl" if devices >= local_world else "gloo"
    return given


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""`ringspan fit`: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ringspan.bench.files import write_json
from ringspan.bench.host import available_bytes, cpu_model, describe_host, stamp
from ringspan.bench.launch import RankFailed, is_under_torchrun, run_here, run_on_processes
from ringspan.fit import check
from ringspan.fit.measure import DTYPES, Request, measure
from ringspan.fit.solve import Node, solve


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0; 1 where a measurement failed or --check is off by more than its limits; 2."""
    options = _parse(arguments)
    try:
        results = _measure(options)
        if int(os.environ.get("RANK", "0")) != 0:
            return 0
        description = _describe(options, results)
        write_json(options.out, description)
        print(f"wrote {options.out}")
        return check.run(description, options.check) if options.check else 0
    except RankFailed as failure:
        print(f"ringspan fit: {failure}", file=sys.stderr)
        return 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ringspan fit", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("machine.json"), help="the description (default machine.json)")
    parser.add_argument("--name", default=cpu_model(), help="of the machine, in the description")
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes of one thread that measure together (default 2)"
    )
    parser.add_argument("--ranks-per-node", type=int, help="default: torchrun's, else as many as there are cores, or 4")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES), metavar="DTYPE")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], metavar="D")
    parser.add_argument("--seq-len", type=int, default=1024, help="of the measured kernels (default 1024)")
    parser.add_argument("--repeats", type=int, default=7, help="calls of each measurement (default 7)")
    parser.add_argument(
        "--check", nargs="*", type=int, metavar="RANKS", help="afterwards, measure six workloads on 2 and 4 ranks (or "
        "on RANKS) and compare them with the simulation"
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for name in ("ranks", "seq_len", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least 1")
    if options.check is not None:
        if is_under_torchrun():
            parser.error("--check starts ranks of its own and cannot run under torchrun")
        options.check = options.check or [2, 4]
    return options


def _ranks_per_node(options: argparse.Namespace) -> int:
    if options.ranks_per_node:
        return options.ranks_per_node
    if is_under_torchrun():
        return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return max(os.cpu_count() or 1, 4)


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    request = Request(
        tuple(options.dtypes), tuple(options.head_dims), _ranks_per_node(options), options.seq_len, options.repeats
    )
    if is_under_torchrun():
        return run_here(measure, request, _backend())
    results = []
    console = Console(stderr=True)
    with console.status("starting the ranks") as status:
        for result in run_on_processes(options.ranks, measure, request):
            results.append(result)
            words = [
                str(result[key]) for key in ("kind", "dtype", "head_dim", "mask", "class", "bytes") if key in result
            ]
            status.update(f"measured {' '.join(words)}")
    return results


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _describe(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    per_node = _ranks_per_node(options)
    backend = _backend() if is_under_torchrun() else "gloo"
    date, _, _ = str(stamp()["date"]).partition("T")
    described = describe_host()
    # Of a rank: its device's, else an equal part of what the system has free; 0 where that does not tell.
    memory_bytes = (available_bytes() or 0) // options.ranks
    if backend == "nccl":
        memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    node = Node(
        ranks=per_node,
        processors=per_node if backend == "nccl" else max(1, os.cpu_count() or 1),
        memory_bytes=memory_bytes,
        waits_for_all=backend == "gloo",
    )
    return solve(
        results,
        name=options.name,
        source=f"ringspan fit, {date}, {described['instruction_set']}, torch {described['torch']}, {backend}",
        node=node,
    )

"""From the command line to a file: options, preflight, the group, the run, and what happens when it fails."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ringspan.bench.config import Config, parse
from ringspan.bench.decision import decide
from ringspan.bench.failures import Reporter, describe
from ringspan.bench.launch import world_group
from ringspan.bench.preflight import check_before
from ringspan.bench.progress import print_summary, progress_bar
from ringspan.bench.ranks import Ranks
from ringspan.bench.result import begin_result, write_result
from ringspan.bench.run import measure, planned_metrics


def run_command(arguments: Sequence[str]) -> int:
    """See `main` in ringspan/bench/__init__.py."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        # Every rank finds the same fault; rank 0 tells it.
        with contextlib.nullcontext() if first else contextlib.redirect_stderr(io.StringIO()):
            config = parse(arguments)
            try:
                checks = check_before(config)
            except ValueError as error:
                print(f"python -m ringspan.bench: error: {error}", file=sys.stderr)
                raise SystemExit(2) from error
    except SystemExit as stop:
        if stop.code and not first:
            # torchrun ends all ranks when the first one is gone: rank 0 is to speak before that.
            time.sleep(2)
        raise
    if config.dry_run:
        return int(first and not _write(config, _begin(config, arguments, checks, uuid.uuid4().hex)))
    return _run(config, arguments, checks)


def _begin(config: Config, arguments: Sequence[str], checks: list[dict[str, str]], run_id: str) -> dict[str, Any]:
    record = begin_result(config, arguments, run_id)
    record["preflight"] = checks
    record["metrics"] = planned_metrics(config)
    record["decision"] = decide({}, config.world, config.repeats, None)
    return record


def _run(config: Config, arguments: Sequence[str], checks: list[dict[str, str]]) -> int:
    record = _begin(config, arguments, checks, _run_id())
    reporter = Reporter(config, record)
    reporter.watch()
    try:
        store = _join(config)
        if config.rank == 0:
            store.set("run", record["run"]["id"])
        record["run"]["id"] = store.get("run").decode()
        reporter.store = store
        # The failure is written before the bar goes: nothing may come between them and torchrun's patience.
        with progress_bar(shown=config.rank == 0) as show:

            def beat(phase: str, done: int, total: int) -> None:
                reporter.beat()
                show(phase, done, total)

            device = f"cuda:{config.local_rank}" if config.backend == "nccl" else "cpu"
            ranks = Ranks(world_group(), device)
            measure(config, ranks, record, beat)
        written = config.rank != 0 or _write(config, record)
        reporter.succeed()
        ranks.barrier()
    except (Exception, KeyboardInterrupt) as error:
        reporter.conclude(describe(error, config.rank))
        # Not sys.exit: taking a group apart whose ranks are lost may wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
    return 0 if written else 1


def _write(config: Config, record: dict[str, Any]) -> bool:
    try:
        write_result(config.output, record, config.force)
    except (OSError, ValueError) as error:
        print(f"python -m ringspan.bench: error: {config.output} could not be written: {error}", file=sys.stderr)
        return False
    print_summary(record, config.output)
    return True


def _join(config: Config) -> dist.Store:
    """Makes the process group; returns a store that all ranks share. The CPU's group, or that of CUDA devices."""
    timeout = datetime.timedelta(seconds=config.timeout_s)
    store: dist.Store = dist.HashStore()
    if "WORLD_SIZE" in os.environ:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if config.backend == "nccl":
        torch.cuda.set_device(config.local_rank)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        config.backend,
        store=dist.PrefixStore(f"group/{attempt}", store),
        rank=config.rank,
        world_size=config.world,
        timeout=timeout,
    )
    return dist.PrefixStore(f"ringspan_bench/{attempt}", store)


def _run_id() -> str:
    """The same on every rank where torchrun gives it; else of this process, until rank 0 tells its own."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return uuid.uuid4().hex if given == "none" else f"{given}/{attempt}"

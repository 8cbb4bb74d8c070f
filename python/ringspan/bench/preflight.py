"""What can be told before anything runs: whether a run would work, and whether its times would mean anything."""

from __future__ import annotations

import os
from typing import Any

import torch

from ringspan.bench.config import BATCH, Config
from ringspan.bench.host import available_bytes
from ringspan.bench.inputs import has_reference
from ringspan.bench.result import check_free

# Kernels' workspaces and what a process with PyTorch holds anyway.
_PROCESS_BYTES = 400 << 20


def check_before(config: Config) -> list[dict[str, str]]:
    """One entry {check, status, detail} for each thing that was looked at; status "ok" or "warning".

    Raises ValueError, with both values, for what would make the run fail: memory, or a file that is not to be written.
    """
    checks = [_check_cores(config), _check_shards(config), _check_memory(config)]
    check_free(config.output, config.run_label, config.force)
    reference = "small enough for a float64 reference"
    if not has_reference(config):
        reference = "too large for a float64 reference; paths are compared with the replicated one"
    return [
        *checks,
        _entry("reference", "ok", reference),
        _entry("output", "ok", f"{config.output.name} can be written"),
    ]


def kv_bytes(config: Config, rows: int) -> int:
    """Bytes of K and V of `rows` positions."""
    return BATCH * rows * config.kv_heads * 2 * config.head_dim * config.torch_dtype.itemsize


def longest_shard(config: Config) -> int:
    """Rows of the largest shard, to which the all-gather pads the others."""
    smap = config.shard_map()
    return max(smap.local_rows(rank) for rank in range(config.world))


def estimate_rank_bytes(config: Config) -> int:
    """An upper estimate of what the fullest rank holds at once, in bytes.

    The whole input (every rank draws it, in fp32 before it is rounded), three copies of K and V, the largest part of
    the ledger, a causal mask of the local queries with PyTorch's copy of it, and for small problems the float64
    reference with the dense scores of one KV head.
    """
    size, rows = config.torch_dtype.itemsize, longest_shard(config)
    numbers = sum(torch.Size(shape).numel() for shape in config.shapes())
    if config.backward:
        numbers += torch.Size(config.shapes()[0]).numel()
    held = numbers * (4 + size) + 3 * kv_bytes(config, config.seq_len)
    peaks = [ledger for choice in config.choices() for ledger in config.plan(*choice).ledger()]
    held += max(max(one.forward.peak_bytes, one.backward.peak_bytes * config.backward) for one in peaks)
    if config.mask == "causal":
        held += rows * config.seq_len * (1 + size)
    # Results are compared in float64.
    held += 3 * numbers * 8
    if has_reference(config):
        scores = config.num_heads // config.kv_heads * config.seq_len**2
        held += scores * 8 * (5 if config.backward else 3)
    return held + _PROCESS_BYTES


def _check_cores(config: Config) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    detail = f"{config.local_world} ranks on {cores} cores, of which {busy:.1f} were busy in the last minute"
    if config.local_world > cores:
        return _entry("cores", "warning", detail + "; ranks share cores, so times say little about the exchange")
    if config.local_world > cores - busy + 0.5:
        return _entry("cores", "warning", detail + "; something else is running, so times will spread")
    return _entry("cores", "ok", detail)


def _check_shards(config: Config) -> dict[str, str]:
    smap = config.shard_map()
    rows = [smap.local_rows(rank) for rank in range(config.world)]
    detail = f"{config.seq_len} positions as {rows} rows, {config.shard}"
    if min(rows) == 0:
        return _entry("shards", "warning", detail + "; a rank without rows only takes part in exchanges")
    if min(rows) < max(rows):
        detail += f"; the gathered path pads each shard to {max(rows)}"
    return _entry("shards", "ok", detail)


def _check_memory(config: Config) -> dict[str, str]:
    needed, available = config.local_world * estimate_rank_bytes(config), available_bytes()
    detail = f"about {needed / 1e6:.0f} MB for {config.local_world} ranks"
    if available is None:
        return _entry("memory", "warning", detail + "; this system does not tell what is available")
    if needed > available:
        raise ValueError(
            f"--seq-len {config.seq_len} with {config.local_world} ranks needs {detail}, but {available / 1e6:.0f} MB "
            "are available; give a smaller --seq-len or fewer ranks"
        )
    return _entry("memory", "ok", f"{detail}, {available / 1e6:.0f} MB available")


def _entry(name: str, status: str, detail: str) -> dict[str, Any]:
    return {"check": name, "status": status, "detail": detail}

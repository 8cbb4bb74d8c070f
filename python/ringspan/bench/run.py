"""One run on a group: check every path, time every path, decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspan.bench.config import Config
from ringspan.bench.decision import decide
from ringspan.bench.inputs import Inputs, has_reference
from ringspan.bench.judge import RunFailed, check_paths, find_faults, largest_error
from ringspan.bench.measure import describe_times, time_paths
from ringspan.bench.paths import GATHERED, REPLICATED, MeasuredPath, build_paths
from ringspan.bench.preflight import kv_bytes, longest_shard
from ringspan.bench.ranks import Ranks

# Called with what is being done, how much of it is done, and how much there is.
Beat = Callable[[str, int, int], None]


def planned_metrics(config: Config) -> dict[str, Any]:
    """The entry `metrics` before anything has run: sizes, and bytes by the ledger; those of the fullest rank."""
    ledger = config.plan("gather", "all_gather").ledger()
    return {
        "max_abs_error": None,
        "local_kv_bytes_per_rank": kv_bytes(config, longest_shard(config)),
        "replicated_kv_bytes_per_rank": kv_bytes(config, config.seq_len),
        "kv_exchange_bytes_per_rank": max(rank.forward.sent_bytes for rank in ledger),
        "exposed_exchange_ms_proxy": None,
        "exposed_exchange_ms_raw": None,
        "reference": None,
        "paths": {},
    }


def measure(config: Config, ranks: Ranks, record: dict[str, Any], beat: Beat) -> None:
    """Fills `record` (`begin_result`) step by step, so that a failure leaves what was known. Collective.

    Raises RunFailed on every rank alike if ranks disagree in their options, a result is wrong or bytes differ.
    """
    _check_options(config, ranks)
    inputs = Inputs(config, ranks.rank, ranks.device)
    paths = build_paths(config, ranks, inputs)
    metrics = record["metrics"]
    metrics["reference"] = "float64" if has_reference(config) else None
    checked = check_paths(config, ranks, inputs, paths, beat)
    metrics["paths"] = {name: _entry_of(paths[name], checked[name]) for name in paths}
    errors = [entry["max_abs_error"] for name, entry in metrics["paths"].items() if name != REPLICATED]
    metrics["max_abs_error"] = None if None in errors else max(errors, default=None)
    record["evidence_level"] = "correctness_only"
    fault = find_faults(checked)
    if fault:
        raise fault
    if config.repeats:
        _measure_times(config, ranks, paths, record, beat)
    record["decision"] = decide(metrics["paths"], ranks.world, config.repeats, None)


def _measure_times(
    config: Config, ranks: Ranks, paths: dict[str, MeasuredPath], record: dict[str, Any], beat: Beat
) -> None:
    metrics = record["metrics"]
    described = describe_times(config.seq_len, paths, time_paths(config, ranks, paths, beat))
    for name, entry in described.items():
        metrics["paths"][name].update(entry)
    raw = described[GATHERED]["exposed"]["ms"]
    metrics["exposed_exchange_ms_raw"] = raw
    metrics["exposed_exchange_ms_proxy"] = max(raw, 0.0)
    record["evidence_level"] = "measured_cpu" if ranks.device.type == "cpu" else "measured_accelerator"


def _check_options(config: Config, ranks: Ranks) -> None:
    """Every rank was started with the same options."""
    given = ranks.gather(config.shared())
    for rank, options in enumerate(given):
        for name, value in options.items():
            if value != given[0][name]:
                text = f"--{name.replace('_', '-')} is {given[0][name]} on rank 0, but {value} on rank {rank}"
                raise RunFailed("bad_configuration", f"{text}; start every rank with the same options")


def _entry_of(path: MeasuredPath, checked: dict[str, Any]) -> dict[str, Any]:
    return {
        "exchange": path.exchange,
        "schedule": path.schedule,
        "base": path.base,
        "max_abs_error": largest_error(checked),
        **checked,
        "time_ms": None,
        "tokens_per_s": None,
        "exposed": None,
        "without_overlap": None,
        "overlap_share": None,
    }

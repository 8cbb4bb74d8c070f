"""Exact attention over a sequence that no single worker holds.

smap = rs.ShardMap.head_tail(seq_len, world_size)
q, k, v = (smap.shard(t, rank, dim=2) for t in (q, k, v))
out = rs.attention(q, k, v, mask=rs.causal(), shard_map=smap, group=group)
"""

import importlib
from typing import TYPE_CHECKING, Any

import ringspan._ops  # noqa: F401  loads the library and registers its rules
from ringspan.attention import attention
from ringspan.errors import PeerError
from ringspan.flight import FlightEntry, flight_record
from ringspan.group import LOCAL
from ringspan.importing import when_imported
from ringspan.ledger import Ledger
from ringspan.loss import masked_mean_loss
from ringspan.machines import Machine
from ringspan.masks import Mask, bands, causal, chunked, documents, full, prefix, window
from ringspan.pairs import Alibi, alibi
from ringspan.plan import Plan, RankPlan, choose_plan, plan
from ringspan.rank_mesh import RankMesh, init_groups, rank_mesh
from ringspan.schedules import double_ring, hybrid
from ringspan.shard_map import ShardMap
from ringspan.simulation import Candidate, Choice, Simulation
from ringspan.stats import Stats
from ringspan.traffic import Traffic, count_traffic
from ringspan.waiting import hand_over, set_deadline

if TYPE_CHECKING:
    from ringspan.dtensor.dispatcher import disable_cp_dtensor_dispatcher, enable_cp_dtensor_dispatcher
    from ringspan.dtensor.sdpa_hook import sdpa

__all__ = [
    "LOCAL",
    "Alibi",
    "Candidate",
    "Choice",
    "FlightEntry",
    "Ledger",
    "Machine",
    "Mask",
    "PeerError",
    "Plan",
    "RankMesh",
    "RankPlan",
    "ShardMap",
    "Simulation",
    "Stats",
    "Traffic",
    "alibi",
    "attention",
    "bands",
    "causal",
    "choose_plan",
    "chunked",
    "count_traffic",
    "disable_cp_dtensor_dispatcher",
    "documents",
    "double_ring",
    "enable_cp_dtensor_dispatcher",
    "flight_record",
    "full",
    "hand_over",
    "hybrid",
    "init_groups",
    "masked_mean_loss",
    "plan",
    "prefix",
    "rank_mesh",
    "sdpa",
    "set_deadline",
    "window",
]

# What needs DTensors is imported when it is first asked for.
_ON_DTENSORS = {
    "disable_cp_dtensor_dispatcher": "dispatcher",
    "enable_cp_dtensor_dispatcher": "dispatcher",
    "sdpa": "sdpa_hook",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DTENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"ringspan.dtensor.{_ON_DTENSORS[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_on_dtensors() -> None:
    from ringspan.dtensor import npu_ops, sdpa_hook

    npu_ops.register()
    sdpa_hook.register()


when_imported("torch.distributed.tensor", _register_on_dtensors)

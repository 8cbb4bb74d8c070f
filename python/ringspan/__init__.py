"""Exact attention over a sequence that no single worker holds.

smap = rs.ShardMap.head_tail(seq_len, world_size)
q, k, v = (smap.shard(t, rank, dim=2) for t in (q, k, v))
out = rs.attention(q, k, v, mask=rs.causal(), shard_map=smap, group=group)
"""

import torch.distributed

import ringspan._ops  # noqa: F401  loads the library and registers its rules
from ringspan.attention import attention
from ringspan.errors import PeerError
from ringspan.ledger import Ledger
from ringspan.loss import masked_mean_loss
from ringspan.machines import Machine
from ringspan.masks import Mask, bands, causal, chunked, documents, full, prefix, window
from ringspan.pairs import Alibi, alibi
from ringspan.plan import Plan, RankPlan, plan
from ringspan.planner import choose_plan
from ringspan.rank_mesh import RankMesh, init_groups, rank_mesh
from ringspan.schedules import double_ring, hybrid
from ringspan.shard_map import ShardMap
from ringspan.simulation import Candidate, Choice, Simulation
from ringspan.stats import Stats
from ringspan.traffic import Traffic, count_traffic

if torch.distributed.is_available():
    from ringspan.dtensor import contract, sdpa_hook
    from ringspan.dtensor.dispatcher import disable_cp_dtensor_dispatcher, enable_cp_dtensor_dispatcher
    from ringspan.dtensor.sdpa_hook import sdpa

    contract.register()
    sdpa_hook.register()

__all__ = [
    "Alibi",
    "Candidate",
    "Choice",
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
    "full",
    "hybrid",
    "init_groups",
    "masked_mean_loss",
    "plan",
    "prefix",
    "rank_mesh",
    "sdpa",
    "window",
]

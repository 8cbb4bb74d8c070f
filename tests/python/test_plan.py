"""rs.plan: what it says is what the documented formulas give, and every kept pair stands in it once."""

import json

import oracle
import pytest
import torch
from cases import map_of

import ringspan as rs

SIZES = {"fp32": (torch.float32, 4, 4), "bf16": (torch.bfloat16, 2, 4), "fp64": (torch.float64, 8, 8)}


def parts(seq_len, world, split="head_tail"):
    return [len(part) for part in oracle.holdings((split,), seq_len, world)]


@pytest.mark.parametrize("exchange", ["all_to_all", "p2p"])
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize(("seq_len", "world"), [(24, 3), (17, 4), (8, 1), (3, 4)])
def test_sent_bytes_by_formula(seq_len, world, dtype, exchange):
    """Forward passes on the K/V of all others; backward those and their gradients, in the accumulator's type."""
    torch_dtype, element, accumulator = SIZES[dtype]
    plan = rs.plan(
        (2, 4, seq_len, 16),
        (2, 2, seq_len, 16),
        (2, 2, seq_len, 8),
        dtype=torch_dtype,
        mask=rs.causal(),
        shard_map=rs.ShardMap.head_tail(seq_len, world),
        exchange=exchange,
    )
    rows = parts(seq_len, world)
    row_values = 2 * 2 * (16 + 8)
    for rank in range(world):
        passed_on = [rows[(rank - step) % world] for step in range(world - 1)]
        forward = sum(passed_on) * row_values * element
        # The gradients of a rank's own K/V stay at home by p2p and make the whole round by all_to_all.
        skip = 1 if exchange == "p2p" else 0
        travelling = [rows[(rank - step) % world] for step in range(skip, world)] if world > 1 else []
        assert plan.sent_bytes(rank).forward == forward
        assert plan.sent_bytes(rank).backward == forward + sum(travelling) * row_values * accumulator


def test_json_holds_every_pair_once():
    seq_len, world = 21, 3
    rule = ("window", 4, 1)
    plan = rs.plan(
        (1, 2, seq_len, 8),
        (1, 2, seq_len, 8),
        (1, 2, seq_len, 8),
        mask=rs.window(4, 1),
        shard_map=rs.ShardMap.striped(seq_len, world),
    )
    count = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    for part in json.loads(plan.to_json())["ranks"]:
        assert json.loads(plan.rank(part["rank"]).to_json()) == part
        for step in plan.rank(part["rank"]).forward:
            for tile in step["tiles"]:
                for row in range(tile["q_rows"]):
                    for column in range(tile["kv_rows"]):
                        i = tile["q_pos0"] + row * tile["q_stride"]
                        j = tile["kv_pos0"] + column * tile["kv_stride"]
                        count[i, j] += tile["lo"] <= j - i <= tile["hi"]
    assert count.tolist() == oracle.keep_of(rule, seq_len, seq_len)[0].astype(int).tolist()


def test_text_names_what_is_planned():
    plan = rs.plan((1, 8, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16), world_size=4)
    assert plan.world_size == 4
    assert "8/2" in str(plan) or "heads 8" in str(plan)
    assert len(str(plan.rank(1))) > 0
    assert len(plan.rank(1).forward) == 4


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_layouts_plan_alike(layout):
    shapes = {
        "BNSD": ((1, 4, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8)),
        "BSND": ((1, 32, 4, 8), (1, 32, 2, 8), (1, 32, 2, 8)),
        "BSH": ((1, 32, 32), (1, 32, 16), (1, 32, 16)),
        "SBH": ((32, 1, 32), (32, 1, 16), (32, 1, 16)),
    }[layout]
    heads = 4 if layout in ("BSH", "SBH") else None
    plan = rs.plan(*shapes, layout=layout, num_heads=heads, shard_map=rs.ShardMap.contiguous(32, 2))
    assert plan.sent_bytes(0).forward == 16 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"dtype": torch.int32}, "int32"),
        ({"world_size": 0}, "0"),
        ({"world_size": 3, "shard_map": rs.ShardMap.contiguous(32, 2)}, "2 ranks.*3"),
        ({"shard_map": rs.ShardMap.contiguous(31, 2)}, "32.*31"),
        ({"scale": float("nan")}, "nan"),
    ],
)
def test_refusals(changes, pattern):
    with pytest.raises(ValueError, match=pattern):
        rs.plan((1, 4, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8), **changes)


def test_ranks_outside_and_a_bad_softcap():
    plan = rs.plan((1, 4, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8), world_size=2)
    with pytest.raises(ValueError, match=r"rank 2.*2 ranks"):
        plan.rank(2)
    with pytest.raises(ValueError, match=r"rank -1.*2 ranks"):
        plan.ledger().rank(-1)
    with pytest.raises(ValueError, match=r"softcap is -1\.0"):
        rs.plan((1, 4, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8), softcap=-1.0)


def test_work_of_maps_agrees_with_plans():
    smap = map_of(("striped",), 21, 3)
    plan = rs.plan((1, 1, 21, 8), (1, 1, 21, 8), (1, 1, 21, 8), mask=rs.causal(), shard_map=smap)
    for rank, pairs in enumerate(smap.work(rs.causal())):
        counted = 0
        for step in plan.rank(rank).forward:
            for tile in step["tiles"]:
                for row in range(tile["q_rows"]):
                    i = tile["q_pos0"] + row * tile["q_stride"]
                    columns = [tile["kv_pos0"] + c * tile["kv_stride"] for c in range(tile["kv_rows"])]
                    counted += sum(tile["lo"] <= j - i <= tile["hi"] for j in columns)
        assert counted == pairs


SHAPES = ((1, 4, 32, 8), (1, 2, 32, 8), (1, 2, 32, 8))


@pytest.mark.filterwarnings("error")
def test_all_gather_is_schedule_gathers():
    named = rs.plan(*SHAPES, world_size=4, schedule="gather", exchange="all_gather")
    assert [len(named.rank(1).forward), named.ledger().rank(1).forward.messages] == [2, 1]
    assert rs.plan(*SHAPES, world_size=4, exchange="all_gather").to_json() == named.to_json()
    advice = r'schedule is "pruned".*use schedule="gather", exchange="all_gather"'
    with pytest.raises(ValueError, match=advice):
        rs.plan(*SHAPES, world_size=4, schedule="pruned", exchange="all_gather").ledger().rank(0)


def test_a_ring_by_all_gather_is_gather_for_one_version_more():
    with pytest.warns(FutureWarning, match='use schedule="gather", exchange="all_gather"'):
        alias = rs.plan(*SHAPES, world_size=4, schedule="ring", exchange="all_gather")
    assert alias.to_json() == rs.plan(*SHAPES, world_size=4, schedule="gather", exchange="all_gather").to_json()
    query, key, value = (torch.randn(shape) for shape in SHAPES)
    with pytest.warns(FutureWarning, match="refused by the next version"):
        out = rs.attention(query, key, value, schedule="ring", exchange="all_gather")
    assert torch.equal(out, rs.attention(query, key, value))

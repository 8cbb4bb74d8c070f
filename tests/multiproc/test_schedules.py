"""Every schedule through `rs.attention`: exact against the oracle, as its ledger says, refused where it cannot be."""

from __future__ import annotations

import itertools
import random

import judge
import numpy as np
import pytest
from cases import Case
from test_sweep import drawn_cases, masks_of, splits_of

import ringspan as rs

PLAIN = ["gather", "ulysses", "pruned", "q_ring", "invariant"]
SCHEDULES = {
    1: PLAIN,
    2: PLAIN,
    3: PLAIN,
    4: [*PLAIN, rs.hybrid(ulysses=2, ring=2), rs.double_ring(inner=2, outer=2), "hybrid:4", "double_ring:2"],
}
EXCHANGES = ["all_to_all", "p2p"]
HEADS = [(1, 1), (4, 2), (6, 2), (5, 1), (3, 3)]  # divisible among the ranks or not, fewer than ranks


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", SCHEDULES)
def test_masks_and_splits(pool, world, exchange):
    seq_len, batch = 19, 2
    masks, splits = masks_of(seq_len, batch), splits_of(seq_len, world)
    chosen = [(masks[m], s) for m in ("full", "causal", "window", "documents") for s in splits.values()]
    cases = [
        Case(mask, split, seq_len=seq_len, batch=batch, exchange=exchange, schedule=schedule, seed=index, lse_grad=True)
        for schedule in SCHEDULES[world]
        for index, (mask, split) in enumerate(chosen)
    ]
    judge.check(pool, world, cases)


def scheduled_cases(world: int, dtype: str, count: int) -> list[Case]:
    """The sweep's calls by other schedules. Tensors that all query rows share stay out: a rank with a single row takes
    them for its own, which the others refuse.
    """
    source = random.Random(f"schedules {world} {dtype}")
    found = []
    for case in drawn_cases(world, dtype, count, HEADS):
        shared = {name: None for name in ("bias", "attn_mask") if "S" not in (getattr(case, name) or "S")}
        exchange, schedule = source.choice(EXCHANGES), source.choice(SCHEDULES[world])
        found.append(case.but(exchange=exchange, schedule=schedule, **shared))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("world", SCHEDULES)
def test_drawn_calls(pool, world, dtype):
    judge.check(pool, world, scheduled_cases(world, dtype, 40))


@pytest.mark.parametrize("world", [2, 3])
def test_a_boolean_mask_travels_with_its_rows(pool, world):
    cases = [
        Case(("causal",), ("head_tail",), seq_len=21, batch=2, schedule=schedule, exchange=exchange, attn_mask=axes)
        for schedule, exchange, axes in itertools.product(
            ("ulysses", "q_ring", "invariant"), EXCHANGES, ("BNSK", "SK", "K")
        )
    ]
    judge.check(pool, world, cases)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_and_messages_are_those_of_the_ledger(pool, world, exchange):
    for schedule in ["ring", *SCHEDULES[world]]:
        for dtype in ("float32", "bfloat16"):
            found = pool.run("ledger_jobs:schedule_matches", world, schedule=schedule, exchange=exchange, dtype=dtype)
            assert not any(found), f"{schedule} {dtype}: {found}"


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_are_one_for_each_post(pool, world):
    """fp32, where all tensors of a step travel together."""
    hops = world - 1
    expected = {
        "gather": (1, 3),
        "ulysses": (2, 4),
        "pruned": (hops, 3 * hops),
        "q_ring": (hops, 3 * hops + 1),
        "invariant": (1, 3),  # one block of K/V; in backward one more, and one of queries
    }
    for schedule, (forward, both) in expected.items():
        for found in pool.run(
            "ring_jobs:collectives", world, exchange="all_to_all", inference=False, schedule=schedule
        ):
            assert found == {"forward": {"all_to_all_single": forward}, "both": {"all_to_all_single": both}}, schedule


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_invariant_has_the_same_bits_for_every_split(pool, dtype):
    """Three blocks of 768 positions; out, lse, dq, dk and dv on one rank against every other split and exchange."""
    seq_len, case = 1637, Case(("causal",), q_heads=2, kv_heads=1, dtype=dtype, schedule="invariant", lse_grad=True)
    splits = [("contiguous",), ("head_tail",), ("striped",), ("per_document", (390, 1, 700, 546))]
    masks = [("causal",), ("window", 100, 0)]
    for mask in masks:
        alone = bits_of(pool, 1, case.but(mask=mask, seq_len=seq_len))
        for (world, split), exchange in zip(itertools.product((2, 3, 4), splits), itertools.cycle(EXCHANGES)):
            other = case.but(mask=mask, seq_len=seq_len, split=split, exchange=exchange)
            assert bits_of(pool, world, other) == alone, f"{split} over {world} ranks, {exchange}"


def bits_of(pool, world: int, case: Case) -> dict[str, bytes]:
    """Each result of all ranks in the order of positions, as bytes."""
    whole: dict[str, np.ndarray] = {}
    for found in pool.run("ring_jobs:results_by_position", world, case=case):
        for name, (rows, positions) in found.items():
            shape = (*rows.shape[:2], case.seq_len, *rows.shape[3:])
            whole.setdefault(name, np.zeros(shape, rows.dtype))[:, :, positions] = rows
    return {name: rows.tobytes() for name, rows in whole.items()}


@pytest.mark.parametrize("schedule", [*SCHEDULES[4], "ring"])
def test_compiled_and_checkpointed(pool, schedule):
    world = 4 if ":" in schedule else 2
    assert max(pool.run("ring_jobs:compiled_schedule", world, schedule=schedule)) <= 1e-5


def test_what_does_not_fit_is_refused_on_every_rank(pool):
    calls = {
        "hybrid:3x1": "3 must divide 2",
        "hybrid:2x2": "for 4 ranks, the group has 2",
        "double_ring:2x4": "for 8 ranks, the group has 2",
    }
    for schedule, message in calls.items():
        for kind, text in pool.run("ring_jobs:refused_schedule", 2, schedule=schedule, exchange="auto"):
            assert kind == "ValueError"
            assert message in text
    for kind, text in pool.run("ring_jobs:refused_schedule", 2, schedule="pruned", exchange="all_gather"):
        assert kind == "ValueError"
        assert "pruned" in text
        assert 'use schedule="gather", exchange="all_gather"' in text

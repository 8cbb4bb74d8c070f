"""The ledger against reality: bytes and messages as posted, memory as allocated."""

from __future__ import annotations

import pytest

import ringspan as rs
from ringspan import names

EXCHANGES = names.EXCHANGES[1:]  # without auto
SPLITS = ["contiguous", "head_tail", "striped", "uneven"]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_posted_bytes_equal_the_ledger(pool, world):
    answers = pool.run(
        "ledger_jobs:counted", world, splits=SPLITS, exchanges=EXCHANGES, dtypes=["float32", "bfloat16", "float64"]
    )
    for rank in answers:
        assert len(rank) == len(SPLITS) * len(EXCHANGES) * 3
        for counted in rank:
            assert counted.posted == counted.ledger, counted.case
            assert (counted.posted[1][1] > 0) == (world > 1), counted.case


@pytest.mark.parametrize("world", [2, 3])
def test_the_counter_counts_what_is_posted(pool, world):
    assert all(pool.run("ledger_jobs:counter_counts_what_is_posted", world))


@pytest.mark.parametrize("schedule", ["gather", "pruned", rs.double_ring(inner=2, outer=2)])
def test_peak_bytes_of_other_schedules(profiled_pool, schedule):
    """What still travels counts until it has arrived, also where its slot has another use by then."""
    for rank in profiled_pool.run("ledger_jobs:peaks", 4, exchange="p2p", dtype="float32", schedule=schedule):
        for held, least, most in rank:
            assert least - 4096 <= held <= most + 4096, f"{schedule}: {rank}"


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_peak_bytes_are_those_of_the_allocator(profiled_pool, world, exchange):
    """Exact for p2p but for the small tensors of the agreement and of autograd; `ledger_jobs.peaks` has the bounds."""
    for dtype in ("float32", "bfloat16"):
        for rank in profiled_pool.run("ledger_jobs:peaks", world, exchange=exchange, dtype=dtype):
            for held, least, most in rank:
                assert least - 4096 <= held <= most + 4096, f"{exchange} {dtype}: {rank}"

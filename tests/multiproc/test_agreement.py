"""Ranks that disagree (case A23): an error on every rank, within seconds, that names both values; nothing hangs."""

from __future__ import annotations

import re

import pytest
from pool import Fresh

from ringspan import names

SECONDS = 10
EXCHANGES = names.EXCHANGES[1:]  # without auto

# What rank 0 does otherwise -> what the message has to show.
DIFFERENCES = {
    "rows": [r"\b6\b|12|18|24", r"\b8\b|16|24|32"],
    "rows of a map": [r"\b8\b", r"\b9\b"],
    "query heads": [r"\b8\b", r"\b4\b"],
    "key heads": [r"\b1\b", r"\b2\b"],
    "mask": ["full|0", "causal|1"],
    "window": [r"\b3\b", r"\b4\b"],
    "documents": [r"\b4\b", r"\b5\b"],
    "map": ["striped|2", "contiguous|0"],
    "dtype": ["bf16|bfloat16|BFloat16", "fp32|float32|Float"],
    "scale": [r"0\.5", r"0\.25"],
    "exchange": ["all_gather", "p2p"],
    "softcap": [r"\b30\b", r"\b20\b"],
    "dropout": [r"0\.5", r"0\.25"],
    "bias": ["Float", "none"],
    "layout": ["BSND", "BNSD"],
    "gradients": ["needs_grad", "true", "false"],
}

# What rank 0 does wrong -> the exception there, and what all messages have to show.
REFUSALS = {
    "scale": ("ValueError", "nan"),
    "dtype mix": ("ValueError", "float64"),
    "dimensions": ("ValueError", "3 dimensions"),
    "schedule": ("ValueError", "ulysses"),
    "rows of a mask": ("ValueError", r"\[7, \d+\]"),
    "map of another world": ("ValueError", "ranks"),
    "rows against the map": ("ValueError", r"\b7\b.*\b8\b"),
    "document lengths": ("ValueError", "-3"),
}


def assert_all_raise(outcomes, patterns):
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "ValueError", f"rank {rank}: {outcome}"
        assert outcome.seconds < SECONDS, f"rank {rank}: {outcome}"
        assert outcome.usable
        for pattern in patterns:
            assert re.search(pattern, outcome.message), f"rank {rank}: {pattern} is not in: {outcome.message}"


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize("world", [2, 3])
def test_one_rank_makes_another_call(pool, world, what):
    for exchange in EXCHANGES:
        outcomes = pool.run("agreement_jobs:one_differs", world, what=what, exchange=exchange)
        assert_all_raise(outcomes, DIFFERENCES[what])


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.parametrize("world", [2, 4])
def test_one_rank_is_refused(pool, world, what):
    kind, pattern = REFUSALS[what]
    outcomes = pool.run("agreement_jobs:one_is_refused", world, what=what)
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == (kind if rank == 0 else outcome.kind)
        assert outcome.kind in ("ValueError", "NotImplementedError"), f"rank {rank}: {outcome}"
        assert outcome.seconds < SECONDS
        assert outcome.usable
        assert re.search(pattern, outcome.message, re.DOTALL), f"rank {rank}: {outcome.message}"
        if rank > 0:
            assert "rank 0" in outcome.message


@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_rank_repeats_an_earlier_call(pool, world):
    assert_all_raise(pool.run("agreement_jobs:one_repeats", world), [r"\b8\b|16|24|32", r"\b16\b|32|48|64"])


@pytest.mark.parametrize("world", [2, 3])
def test_backward_of_another_forward(pool, world):
    assert_all_raise(pool.run("agreement_jobs:backwards_in_another_order", world), ["call|forward"])


@pytest.mark.parametrize("world", [2, 3])
def test_forward_meets_backward(pool, world):
    assert_all_raise(pool.run("agreement_jobs:forward_meets_backward", world), ["attention|forward", "backward"])


@pytest.mark.parametrize("world", [2, 3])
def test_unshard_agrees_too(pool, world):
    assert_all_raise(pool.run("agreement_jobs:unshard_differs", world), [r"\b3\b", r"\b4\b"])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_never_calls(pool, world, backward):
    timeout_s = 2
    outcomes = pool.run("agreement_jobs:one_never_calls", world, fresh=Fresh(timeout_s), backward=backward)
    for outcome in outcomes[:-1]:
        assert outcome.kind == "DistBackendError", outcome
        assert timeout_s * 0.5 <= outcome.seconds < timeout_s + SECONDS
        assert f"rank {world - 1}" in outcome.message or f"peer {world - 1}" in outcome.message


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_dies(pool, world):
    timeout_s = 2
    outcomes = pool.run("agreement_jobs:one_dies", world, fresh=Fresh(timeout_s), may_die=(world - 1,))
    for outcome in outcomes[:-1]:
        assert outcome.kind == "DistBackendError", outcome
        assert outcome.seconds < timeout_s + SECONDS


@pytest.mark.parametrize("world", [2, 4])
def test_many_calls_on_two_groups(pool, world):
    rounds = 200 if world == 4 else 60
    assert max(pool.run("agreement_jobs:alternate", world, fresh=Fresh(), rounds=rounds, exchanges=EXCHANGES)) <= 1e-5

"""The steps of accelerators in groups, on stand-ins for their ops."""

from __future__ import annotations

import itertools

import pytest
import standins
from cases import Case
from judge import limit_of

from ringspan import names

EXCHANGES = names.EXCHANGES[1:]  # without auto
RULES = [("full",), ("causal",), ("window", 6, 0), ("ids", (1,) * 5 + (2,) * 9 + (0,) + (3,) * 8)]


def splits_of(world):
    shuffled = tuple((*range(rank, 23, world), -1) for rank in range(world))
    lengths = [0] * (world - 1) + [23]
    return [("contiguous",), ("head_tail",), ("striped",), ("positions", shuffled), ("lengths", tuple(lengths))]


@pytest.mark.parametrize("kind", standins.KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_groups_are_exact(pool, world, kind):
    splits, cases = splits_of(world), []
    for index, (split, rule) in enumerate(itertools.product(splits, RULES)):
        exchange = EXCHANGES[index % 3]
        dtype = ("float32", "bfloat16")[index % 2]
        kv_split = splits[(index + 1) % len(splits)] if index % 4 == 3 else None
        cases.append(Case(rule, split, kv_split, seq_len=23, exchange=exchange, dtype=dtype, seed=index))
    cases.append(Case(("causal",), ("head_tail",), seq_len=23, sink=(0.5, -1.0, 3.0, 0.25)))
    cases.append(Case(("causal",), splits[3], seq_len=23, sink=(0.5, -1.0, 3.0, 0.25), dtype="bfloat16"))
    answers = pool.run("device_jobs:errors", world, kind=kind, cases=cases)
    faults = [
        f"{name} of rank {rank} off by {error:.3g} in {case}"
        for rank, (found, _) in enumerate(answers)
        for case, errors in zip(cases, found, strict=True)
        for name, error in errors.items()
        if not error <= limit_of(name, case.dtype)
    ]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:10])
    for name in ("forward", "backward", "update") if kind == "npu" else ():
        assert all(calls[name] > 0 for _, calls in answers)


@pytest.mark.parametrize("kind", standins.KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_collectives_are_counted(pool, world, kind):
    for found in pool.run("device_jobs:collectives", world, kind=kind, exchange="all_to_all"):
        assert found["forward"] == {"all_to_all_single": world - 1}
        assert found["both"] == {"all_to_all_single": 3 * world - 2}
    for found in pool.run("device_jobs:collectives", world, kind=kind, exchange="all_gather"):
        assert found["forward"] == {"all_gather_into_tensor": 1}


@pytest.mark.parametrize("kind", standins.KINDS)
def test_ranks_may_differ_in_their_arithmetic(pool, kind):
    assert max(pool.run("device_jobs:mixed", 3, kind=kind)) <= 2e-5


@pytest.mark.parametrize("kind", standins.KINDS)
def test_backwards_in_any_order(pool, kind):
    assert all(pool.run("device_jobs:backwards_in_any_order", 2, kind=kind))

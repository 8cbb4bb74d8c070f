"""PyTorch's context parallelism on CPU: SDPA inside `context_parallel` and under the `_ContextParallel` plan."""

from __future__ import annotations

import itertools
import os

import pytest
from sdpa_jobs import Setting


def judge(setting: Setting, answer: dict) -> None:
    """The requirement's tolerances."""
    assert answer.pop("ulp", 0) <= 1, setting
    limits = {name: excess[1 if setting.dtype == "bfloat16" else 0] for name, excess in answer.items()}
    assert len(limits) == (1 if setting.forward_only else 4)
    assert max(limits.values()) <= 0, (setting, answer)


def check(pool, world: int, setting: Setting) -> None:
    for answer in pool.run("sdpa_jobs:step", world, setting=setting):
        judge(setting, answer)


MATRIX = [
    Setting(*choice)
    for choice in itertools.product(
        (True, False), (True, False), ("alltoall", "allgather"), (False, True), (True, False), (True, False),
        ("float32", "bfloat16"),
    )
]  # fmt: skip


# `make test-matrix` runs all of it, on 2 and on 4 ranks.
WHOLE_MATRIX = "RINGSPAN_WHOLE_MATRIX" in os.environ


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_requirement_matrix(pool, compiled, world):
    settings = [setting for setting in MATRIX if setting.compiled == compiled]
    # Steps that are odd, so that each value of each argument occurs on both worlds. What is traced does not depend on
    # the number of ranks: on 4 of them two opposite settings (1 and 62 of 64) are compiled.
    step = {(False, 2): 5, (False, 4): 5, (True, 2): 15, (True, 4): 61}[compiled, world]
    for setting in settings if WHOLE_MATRIX else settings[world // 4 :: step]:
        check(pool, world, setting)


@pytest.mark.parametrize("use_context", [True, False])
def test_what_sdpa_takes(pool, use_context):
    base = Setting(use_context=use_context)
    for changes in (
        {"kv_heads": 2}, {"scale": 0.3}, {"is_causal": False, "mask": "bool"}, {"is_causal": False, "mask": "float"},
        {"is_causal": False, "mask": "float", "load_balance": False}, {"math": True},
    ):  # fmt: skip
        check(pool, 2, Setting(**{**vars(base), **changes}))


def test_every_way_in(pool):
    for answer in pool.run("sdpa_jobs:every_way_in", 2):
        assert max(answer.values()) <= 2e-6, answer


def test_enable_and_disable_leave_all_as_it_was(pool):
    assert pool.run("sdpa_jobs:leaves_all_as_it_was", 2) == [[], []]


def test_load_balancers_are_followed_or_refused(pool):
    for answer in pool.run("sdpa_jobs:balancers", 2):
        assert answer["seen"] <= 2e-6
        assert "sharded with a load balancer before ringspan was told" in answer["unseen"]


def test_sdpa_refuses_by_name(pool):
    for told in pool.run("sdpa_jobs:refused", 2):
        assert "is_causal=True and attn_mask are both given" in told["both"]
        assert "attn_mask has shape [2, 1, 32, 32]" in told["rows"]
        assert "query has 2 heads and key 4" in told["heads"]


def test_dropout_reaches_our_kernels(pool):
    for answer in pool.run("sdpa_jobs:dropout", 2):
        assert abs(answer["kept"] - 0.75) < 0.01
        assert abs(answer["gap"]) < 1e-5


def test_a11_buffers_are_as_they_were(pool):
    assert pool.run("sdpa_jobs:context_restores", 2) == [[], []]

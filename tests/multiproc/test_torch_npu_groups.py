"""The stand-in for torch_npu in groups: the contract's ops run by its functions, which callers may replace."""

from __future__ import annotations

import pytest
from npu_cases import Call, kept, upper
from test_sdpa import MATRIX, WHOLE_MATRIX, judge


@pytest.mark.parametrize("split", ["contiguous", "head_tail", "striped"])
@pytest.mark.parametrize("mode", [None, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_groups_run_the_modules_functions(pool, world, mode, split):
    arguments = {} if mode is None else {"atten_mask": upper(), "sparse_mode": mode}
    keep = None if mode is None else kept(mode, 9, 13)[None]
    call = Call(keep=keep, v_dim=8, arguments=arguments)
    answers = pool.run(
        "npu_jobs:errors", world, call=call, split=(split,), kv_split=(split,), exchange="all_to_all", full_mask=False
    )
    for found, calls in answers:
        found.pop("seed")
        assert max(found.values()) <= 5e-5, found
        assert calls["npu_fusion_attention_v3"] > 0
    assert sum(calls["npu_ring_attention_update"] for _, calls in answers) > 0


def test_what_steps_cannot_do_is_exact_too(pool):
    call = Call(keep=kept(3, 9, 13)[None], arguments={"atten_mask": upper(), "sparse_mode": 3, "keep_prob": 0.6})
    answers = pool.run(
        "npu_jobs:errors", 2, call=call, split=("head_tail",), kv_split=("head_tail",), exchange="p2p", full_mask=False
    )
    for found, calls in answers:
        found.pop("seed")
        assert max(found.values()) <= 5e-5, found
        assert calls["npu_ring_attention_update"] == 0


def test_hccl_is_gloo(pool):
    for total, error in pool.run("npu_jobs:hccl", 4):
        assert total == 4
        assert error <= 1e-5


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_requirement_matrix(pool, compiled, world):
    settings = [setting for setting in MATRIX if setting.compiled == compiled]
    # On 4 ranks two opposite settings (2 and 61 of 64) are compiled, see test_sdpa.
    step = {(False, 2): 7, (False, 4): 7, (True, 2): 18, (True, 4): 59}[compiled, world]
    for setting in settings if WHOLE_MATRIX else settings[world // 2 :: step]:
        answers = pool.run("npu_jobs:step", world, setting=setting)
        for answer, _ in answers:
            judge(setting, answer)
        assert sum(updates for _, updates in answers) > 0, setting


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_are_those_of_the_requirement(pool, world):
    for forward, both in pool.run("npu_jobs:counted_collectives", world):
        assert forward == {"c10d_functional.all_to_all_single": world - 1}
        assert both == {"c10d_functional.all_to_all_single": 3 * world - 2}


@pytest.mark.parametrize("world", [2, 4])
def test_sharding_utilities(pool, world):
    assert pool.run("npu_jobs:utilities", world) == [[]] * world

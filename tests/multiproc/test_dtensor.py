"""Attention and the contract's ops on DTensors: every role of a mesh axis, every layout, on one to three axes."""

from __future__ import annotations

import pytest
from dtensor_jobs import OnMesh

EXACT = 1e-12
ROUNDED = 5e-5  # the contract computes in fp32


def worst(answers: list[dict]) -> float:
    return max(max(answer["errors"].values()) for answer in answers)


MESHES = [
    ((2,), "S"), ((4,), "S"), ((2,), "N"), ((2,), "B"), ((2,), "R"),
    ((2, 2), "BS"), ((2, 2), "NS"), ((2, 2), "SN"), ((2, 2), "SB"), ((2, 2), "BN"), ((2, 2), "RS"),
    ((1, 2, 2), "BNS"), ((2, 1, 2), "BNS"), ((2, 2, 1), "BNS"),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH", "TND"])
@pytest.mark.parametrize("job", ["attention", "contract"])
def test_every_mesh_and_layout(pool, job, layout):
    for shape, roles in MESHES:
        world = 4 if len(shape) > 1 else shape[0]
        if layout == "TND" and ("B" in roles or job == "contract"):
            continue
        case = OnMesh(
            shape, roles, layout=layout, batch=1 if layout == "TND" else 2, v_dim=8 if job == "contract" else 5
        )
        case = case if job == "attention" else OnMesh(**{**vars(case), "dtype": "float32"})
        answers = pool.run(f"dtensor_jobs:{job}", world, case=case)
        assert worst(answers) <= (EXACT if job == "attention" else ROUNDED), (case, answers[0])


@pytest.mark.parametrize("split", ["head_tail", "striped"])
@pytest.mark.parametrize("job", ["attention", "contract"])
def test_the_map_that_is_enabled(pool, job, split):
    for world in (2, 4):
        dtype = "float64" if job == "attention" else "float32"
        case = OnMesh((world,), "S", split=split, q_len=4 * world, kv_len=4 * world, dtype=dtype)
        answers = pool.run(f"dtensor_jobs:{job}", world, case=case)
        assert worst(answers) <= (EXACT if job == "attention" else ROUNDED)


@pytest.mark.parametrize("length", [1, 2, 5, 7, 9])
@pytest.mark.parametrize("job", ["attention", "contract"])
def test_a26_uneven_shards_are_exact(pool, job, length):
    dtype = "float64" if job == "attention" else "float32"
    for world in (2, 4):
        case = OnMesh((world,), "S", q_len=length, kv_len=length, dtype=dtype)
        answers = pool.run(f"dtensor_jobs:{job}", world, case=case)
        assert worst(answers) <= (EXACT if job == "attention" else ROUNDED)
        assert answers[0]["placements"] == "(Shard(dim=2),)"


def test_queries_and_keys_of_different_lengths_and_places(pool):
    cases = [
        OnMesh((2,), "S", q_len=6, kv_len=14),
        OnMesh((2,), "R", kv_roles="S"),
        OnMesh((2,), "S", kv_roles="R"),
        OnMesh((2,), "N", kv_roles="S"),
        OnMesh((2, 2), "SB", kv_roles="RB"),
        OnMesh((2, 2), "SS"),
        # Heads and entries that two ranks cannot share equally.
        OnMesh((2,), "N", q_heads=3, kv_heads=3),
        OnMesh((2,), "N", q_heads=4, kv_heads=1),
        OnMesh((2,), "B", batch=3),
    ]
    for case in cases:
        answers = pool.run("dtensor_jobs:attention", 4 if len(case.shape) > 1 else 2, case=case)
        assert worst(answers) <= EXACT, (case, answers[0])


@pytest.mark.parametrize(
    ("shape", "roles"), [((2,), "S"), ((2,), "N"), ((2,), "B"), ((2, 2), "BS"), ((2, 2), "NS"), ((2, 2), "BN")]
)
def test_per_row_per_head_and_per_pair_operands(pool, shape, roles):
    for answer in pool.run("dtensor_jobs:operands", 4 if len(shape) > 1 else 2, shape=shape, roles=roles):
        assert max(answer.values()) <= EXACT, answer


def test_other_placements_are_redistributed(pool):
    assert max(pool.run("dtensor_jobs:partial_inputs", 2)) <= EXACT


def test_what_is_remembered_of_a_mesh_serves_no_equal_one(pool):
    for answer in pool.run("dtensor_jobs:equal_meshes", 4):
        assert all(answer.values()), answer


def test_the_backward_takes_the_forwards_map(pool):
    for answer in pool.run("dtensor_jobs:backward_after_disable", 2):
        assert max(value for name, value in answer.items() if name.startswith("attention")) <= EXACT
        assert max(answer.values()) <= ROUNDED


def test_bad_calls_are_told_what_is_wrong(pool):
    for told in pool.run("dtensor_jobs:refusals", 2):
        assert "key is a plain tensor beside DTensors" in told["plain"]
        assert "leave it out" in told["group"]
        assert "splits over 3 ranks, but 2 ranks share the sequence" in told["map"]
        assert "gives rank 0 3 rows, but a DTensor of 7 rows on 2 ranks gives it 4" in told["rows"]
        assert told["cp"].startswith("RuntimeError: the .cp overloads take this rank's local tensors")
        assert told["heads"].startswith("RuntimeError: head_num is 3, but query has 2 heads")
        assert told["sink"].startswith("ValueError: sink is of str; give a tensor")
        assert told["one head"] == "nothing"
        assert told["true heads"].startswith("ValueError: num_heads is True")
        assert told["disable"].startswith("RuntimeError: disable_cp_dtensor_dispatcher() without a matching")
        assert told["enable"].startswith("ValueError: shard_map is")


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_are_those_of_the_ring(pool, world):
    for split in ("contiguous", "head_tail"):
        for counts in pool.run("dtensor_jobs:comm_counts", world, split=split):
            assert len(counts) == 6
            for name, counted in counts.items():
                wanted = world - 1 if name.endswith("forward") else world - 1 + 2 * world - 1
                assert counted == {"c10d_functional.all_to_all_single": wanted}, (name, counted)


@pytest.mark.parametrize(
    ("backend", "world", "split"),
    [
        ("aot_eager", 4, "head_tail"),
        ("inductor", 2, "contiguous"),
        ("inductor", 2, "head_tail"),
    ],
)
def test_a26_compiles_on_dtensors(pool, backend, world, split):
    """Inductor traces and differentiates as aot_eager does, and then lowers; aot_eager is what 4 ranks can afford."""
    for answer in pool.run("dtensor_jobs:compiled", world, backend=backend, dynamic=None, split=split, watchdog_s=240):
        for name, found in answer.items():
            assert found["distance"] <= 1e-6, (name, found)
            # A third length compiles nothing new.
            assert found["compilations"][1] == found["compilations"][2] <= 2, (name, found)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_contract_compiles_on_contiguous_dtensors(pool, backend):
    for found in pool.run("dtensor_jobs:compiled_contract", 2, backend=backend, watchdog_s=240):
        assert found["distance"] <= 1e-6
        assert "not contiguous along the sequence is traced by torch.compile" in found["head_tail"]


@pytest.mark.parametrize(("shape", "roles"), [((2,), "S"), ((2,), "N"), ((2,), "B"), ((2, 2), "BS"), ((2, 2), "NS")])
def test_contract_operands(pool, shape, roles):
    for answer in pool.run("dtensor_jobs:contract_operands", 4 if len(shape) > 1 else 2, shape=shape, roles=roles):
        assert max(answer.values()) <= ROUNDED, answer


def test_contract_documents_and_older_versions(pool):
    for roles in ("S", "N"):
        assert max(pool.run("dtensor_jobs:contract_documents", 2, roles=roles)) <= ROUNDED


def test_ranks_outside_the_mesh_get_nothing(pool):
    answers = pool.run("dtensor_jobs:outside_the_mesh", 4)
    assert [answer["shape"] for answer in answers] == ["[1, 2, 8, 4]"] * 4
    assert [answer["rows"] for answer in answers] == ["32", "32", "0", "0"]
    assert [answer["contract"] for answer in answers] == ["32", "32", "0", "0"]

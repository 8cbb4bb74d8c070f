"""TP x CP over four processes: groups of the mesh, groups made by hand, and groups in the wrong order."""

from __future__ import annotations


def test_tp_by_cp_equals_dense(pool):
    for errors in pool.run("mesh_jobs:tp_by_cp", 4):
        assert max(errors.values()) <= 1e-12, errors


def test_a_wrong_group_is_caught(pool):
    for rank, said in enumerate(pool.run("mesh_jobs:wrong_groups", 4)):
        right = [rank % 2, rank % 2 + 2]
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert said["right"] == ""
        assert f"has the ranks {pair}; in this mesh (cp 2 x tp 2) it has {right}." in said["tp_pairs"]
        assert f"has the ranks {right[::-1]}; in this mesh" in said["reversed"]
        assert f"{right} in another order" in said["reversed"]


def test_a_reversed_group_counts_by_place(pool):
    assert max(pool.run("mesh_jobs:reversed_group_by_place", 4)) <= 1e-12


def test_a_mesh_of_another_size(pool):
    for said in pool.run("mesh_jobs:other_world", 4):
        assert said == "the mesh has 8 ranks and the world 4; build it for this world"

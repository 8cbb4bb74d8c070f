"""How the ring runs: collectives and bytes, bits, strides, memory, and gradients across ranks."""

from __future__ import annotations

import pytest
from pool import Fresh

from ringspan import names

EXCHANGES = names.EXCHANGES[1:]  # without auto
WORLDS = [2, 3, 4]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_counts(pool, world, inference):
    for found in pool.run("ring_jobs:collectives", world, exchange="all_to_all", inference=inference):
        assert found["forward"] == {"all_to_all_single": world - 1}
        if not inference:
            assert found["both"] == {"all_to_all_single": 3 * world - 2}


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_counts(pool, world):
    """One gather of K and V in each direction; gradients of K and V go home by all_to_all."""
    for found in pool.run("ring_jobs:collectives", world, exchange="all_gather", inference=False):
        assert found["forward"] == {"all_gather_into_tensor": 1}
        assert found["both"] == {"all_gather_into_tensor": 2, "all_to_all_single": 1}


def test_counting_changes_no_bit(pool):
    assert all(pool.run("ring_jobs:counted_results_are_right", 3))


def test_one_rank_sends_nothing(pool):
    for exchange in EXCHANGES:
        assert pool.run("ring_jobs:collectives", 1, exchange=exchange, inference=False) == [{"forward": {}, "both": {}}]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", [1, *WORLDS])
def test_a17_other_strides_on_each_rank(pool, world, exchange):
    assert all(pool.run("ring_jobs:other_strides_on_each_rank", world, exchange=exchange))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a25_repeats_are_equal_bit_by_bit(pool, dtype, exchange):
    for split in ("contiguous", "head_tail", "striped"):
        assert all(pool.run("ring_jobs:repeats", 4, dtype=dtype, split=split, exchange=exchange, times=20))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", WORLDS)
def test_a23_skipped_hops_still_take_part(pool, world, exchange):
    assert max(pool.run("ring_jobs:skipped_hops", world, exchange=exchange)) <= 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_checkpoint(pool, world, reentrant):
    assert all(pool.run("ring_jobs:checkpointed", world, reentrant=reentrant))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_assume_agreed(pool, world, exchange):
    assert all(pool.run("ring_jobs:assumed", world, exchange=exchange))


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_groups_and_meshes(pool, world):
    assert all(pool.run("ring_jobs:groups_and_meshes", world, fresh=Fresh(reverse=True)))


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_unshard_gradients(pool, world):
    assert all(all(found) for found in pool.run("ring_jobs:unshard_gradients", world))


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_every_rank_sees_all(pool, world):
    pool.run("ring_jobs:seen_by_each_rank", world)


def test_a18_masked_mean_loss(pool):
    valid = [[True, False, False], [True] * 7]
    for averaged_by in (1, 2):
        found = pool.run("ring_jobs:mean_loss", 2, valid=valid, averaged_by=averaged_by)
        assert [shown for _, shown, _ in found] == [1.375, 1.375]
        assert sum(loss for loss, _, _ in found) == pytest.approx(1.375 * averaged_by)
        assert found[0][2] == [averaged_by / 8, 0, 0]
        assert found[1][2] == [averaged_by / 8] * 7


def test_a18_ranks_without_valid_tokens(pool):
    found = pool.run("ring_jobs:mean_loss", 2, valid=[[False, False], [True, True]], averaged_by=1)
    assert found == [(0.0, 1.0, [0.0, 0.0]), (1.0, 1.0, [0.5, 0.5])]
    assert pool.run("ring_jobs:mean_loss", 2, valid=[[False], [False]], averaged_by=1) == [(0.0, 0.0, [0.0])] * 2


def peaks(pool, world, **arguments):
    """The least of three runs: gloo's threads let go of a buffer a moment after the call that waited for it went on."""
    runs = [pool.run("ring_jobs:peak_bytes", world, **arguments) for _ in range(3)]
    return min(max(answer["peak"] for answer in run) for run in runs), runs[0][0]["kv"], runs[0][0]["out"]


@pytest.mark.parametrize("exchange", ["all_to_all", "p2p"])
def test_a24_buffers_do_not_grow_with_ranks(profiled_pool, exchange):
    """Forward: two K/V buffers and the output. Backward: two K/V, dK/dV as two buffers and the result, and dq. The same
    on 2 and 4 ranks."""
    slack = 256 * 1024
    for world in (2, 4):
        peak, kv, out = peaks(profiled_pool, world, exchange=exchange, rows=1024, backward=False)
        assert 0 < peak <= 2 * kv + out + slack, f"forward {peak} on {world} ranks, K and V are {kv}"
        peak, kv, out = peaks(profiled_pool, world, exchange=exchange, rows=1024, backward=True)
        assert 0 < peak <= 2 * kv + 3 * kv + out + slack, f"backward {peak} on {world} ranks, K and V are {kv}"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a24_no_dense_matrix(profiled_pool, exchange):
    for backward in (False, True):
        small, large = (
            peaks(profiled_pool, 2, exchange=exchange, rows=rows, backward=backward)[0] for rows in (512, 2048)
        )
        assert large <= 4.5 * small

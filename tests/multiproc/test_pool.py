"""The pool itself: its groups, and what it does when its processes cannot start or a job of theirs fails."""

from __future__ import annotations

import pool as pools
import pytest
import torch.distributed as dist


@pytest.fixture
def own_pool():
    pool = pools.Pool()
    yield pool
    pool.stop()


def test_a_start_that_takes_too_long_leaves_nothing_behind(own_pool, monkeypatch):
    """The next job starts fresh processes, and its results are its own."""
    with monkeypatch.context() as patched:
        patched.setattr(pools, "WATCHDOG_S", 0)
        with pytest.raises(AssertionError, match="no answer in time"):
            own_pool.run("jobs:errors", 2, cases=[])
    assert own_pool.run("jobs:errors", 2, cases=[]) == [[], []]


@pytest.mark.parametrize("world", [2, 4])
def test_each_group_of_gloo_has_one_worker_thread(own_pool, world):
    """Two of them can corrupt the memory of a process (docs/gloo-race.md)."""
    for threads, groups, by_options in own_pool.run("gloo_threads:threads_and_groups", world, fresh=pools.Fresh()):
        assert groups >= 2
        assert threads == groups, "a group has more than one"
        assert by_options == [1, 1]


def test_groups_of_this_process_have_one_worker_thread():
    """Pages of docs/ are run here."""
    assert dist.ProcessGroupGloo(dist.HashStore(), 0, 1).options._threads == 1

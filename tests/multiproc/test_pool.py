"""The pool itself: what it does when its processes cannot start or a job of theirs fails."""

from __future__ import annotations

import pool as pools
import pytest


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

"""torch.compile(fullgraph=True): no break, eager's results, and no more compilations than shapes ask for."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather", "p2p"])
def test_aot_eager_forward_and_backward(pool, exchange):
    for found in pool.run("compile_jobs:lengths", 2, backend="aot_eager", dynamic=None, exchange=exchange):
        assert found["distance"] <= 1e-6
        assert found["compilations"] == [1, 2, 2]


def test_aot_eager_dynamic_from_the_start(pool):
    for found in pool.run("compile_jobs:lengths", 2, backend="aot_eager", dynamic=True, exchange="auto"):
        assert found["distance"] <= 1e-6
        # The first one may run twice, before and after a symbolic scale has become a number.
        assert found["compilations"] in ([1, 1, 1], [2, 2, 2])


def test_inductor_forward_and_backward(pool):
    found = pool.run("compile_jobs:lengths", 2, watchdog_s=200, backend="inductor", dynamic=None, exchange="all_to_all")
    for answer in found:
        assert answer["distance"] <= 1e-5
        assert answer["compilations"] == [1, 2, 2]


def test_new_values_compile_nothing_new(pool):
    for found in pool.run("compile_jobs:new_values", 2, backend="aot_eager"):
        assert found["distance"] <= 1e-6
        assert found["compilations"] == 1


def test_every_mask_and_map_traces(pool):
    assert max(pool.run("compile_jobs:masks_and_maps", 2)) <= 1e-6

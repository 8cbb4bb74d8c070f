"""transformers models under context parallelism, against eager attention in one process."""

from __future__ import annotations

import hf_models
import pytest

pytestmark = hf_models.needs_transformers
LIMITS = {"logits": hf_models.LOGITS, "loss": 1e-5, "gradients": hf_models.GRADIENTS}
# The first job of a process imports transformers, which takes long where the machine is busy.
PATIENCE = {"watchdog_s": 150}
ALL = [*hf_models.MODELS]


def check(pool, world, cases):
    answers = pool.run("hf_jobs:many_errors", world, cases=cases, **PATIENCE)
    faults = [
        f"{name} of rank {rank} off by {found[name]:.3g} in {case}"
        for rank, ranked in enumerate(answers)
        for case, found in zip(cases, ranked, strict=True)
        for name in LIMITS
        if not found[name] <= LIMITS[name]
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ALL)
def test_each_model(pool, name):
    check(pool, 2, [{"name": name, "split": split} for split in ("contiguous", "head_tail")])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert", "modernbert"])
def test_padding(pool, name):
    cases = [{"name": name, "split": split, "pad": pad} for split in ("contiguous", "head_tail") for pad in (6, -13)]
    check(pool, 2, cases)


@pytest.mark.parametrize("name", ["llama", "llama4_text", "qwen2", "gemma3_text", "gpt_oss", "bert", "modernbert"])
def test_packed_documents(pool, name):
    cases = [
        {"name": name, "split": split, "documents": documents}
        for split in ("contiguous", "head_tail")
        for documents in ([7, 11, 4], [1, 20, 1])
    ]
    check(pool, 2, cases)


def test_every_checked_model_is_tested():
    from ringspan.hf import CHECKED_MODELS

    assert {*ALL} - {"llama4_text"} == CHECKED_MODELS  # which stands for chunks; its temperatures count by themselves


def test_more_ranks_and_other_splits(pool):
    cases = [{"name": "qwen2", "split": split, "length": 23} for split in ("striped", "head_tail", [1, 9, 3, 10])]
    check(pool, 4, cases)


def test_checkpointed_layers_computed_again_outside(pool):
    names = ["llama", "gemma2", "gpt_oss"]
    cases = [{"name": name, "split": "head_tail", "checkpoint": True} for name in names]
    check(pool, 2, [*cases, {"name": "llama", "split": "contiguous", "checkpoint": True, "pad": 6}])


def test_orders_of_backward(pool):
    for found in pool.run("hf_jobs:orders_of_backward", 2, **PATIENCE):
        assert max(found) <= LIMITS["gradients"]


def test_maps_that_differ_between_entries(pool):
    for found in pool.run("hf_jobs:per_entry_map", 2, **PATIENCE):
        assert max(found) <= LIMITS["logits"]


def test_dropout_is_that_of_one_rank(pool):
    for alike, dropped in pool.run("hf_jobs:dropout_is_drawn_alike", 2, **PATIENCE):
        assert alike <= LIMITS["logits"]
        assert dropped > 0.01


def test_refusals_reach_every_rank(pool):
    for told in pool.run("hf_jobs:refusals", 2, **PATIENCE):
        assert told.keys() == {
            "missing",
            "missing on one",
            "local",
            "local on one",
            "labels",
            "cache",
            "rows on one",
            "numbers",
        }
        assert "position_ids are missing" in told["missing"]
        assert "position_ids are missing" in told["missing on one"]
        for name in ("local", "local on one"):
            assert "position_ids of entry 0 hold" in told[name]
        assert "masked_mean_loss" in told["labels"]
        assert "generate on one rank" in told["cache"]
        assert "this rank's rows" in told["rows on one"]
        assert "other numbers than 0 and 1" in told["numbers"]

"""A transformer trained over four processes equals one process in float64: gradients and displayed loss apart."""

from __future__ import annotations

import pytest

STACKS = ["only_cp", "ddp", "fsdp_on_both_axes", "fsdp_flattened", "fsdp_over_dp", "tp", "tp_with_fsdp"]
CHECKPOINTS = pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
EXACT = 1e-10


def check(pool, **arguments):
    for errors in pool.run("training_jobs:train", 4, **arguments):
        assert errors["loss"] <= EXACT, errors
        assert errors["gradients"] <= EXACT, errors


@CHECKPOINTS
@pytest.mark.parametrize("stack", STACKS)
def test_steps_equal_one_process(pool, stack, reentrant):
    check(pool, stack=stack, reentrant=reentrant)


DOCUMENTS = (5, 1, 7)
IDS = (1,) * 5 + (2,) + (3,) * 7
UNEVEN = {
    "contiguous": {"split": ("contiguous",)},
    "striped": {"split": ("striped",)},
    "per_document": {"split": ("per_document", DOCUMENTS), "mask": ("ids", IDS), "seq_lens": (13, 13)},
    "an empty rank": {"split": ("lengths", (13, 0)), "seq_lens": (13, 13)},
}
# PyTorch's colwise linear layer divides by zero where a rank has no token.
SPREAD = [("ddp", name) for name in UNEVEN]
SPREAD += [("fsdp_flattened", "an empty rank"), ("fsdp_flattened", "per_document"), ("tp", "contiguous")]


@pytest.mark.parametrize(("stack", "name"), SPREAD)
def test_uneven_shards(pool, stack, name):
    """13 and 10 tokens on 2 ranks, in shards of unlike lengths."""
    check(pool, stack=stack, **UNEVEN[name])


def test_fewer_tokens_than_ranks(pool):
    check(pool, stack="only_cp", split=("contiguous",), seq_lens=(3, 5))


@pytest.mark.parametrize("stack", STACKS)
def test_accumulation_over_micro_batches_of_unlike_counts(pool, stack):
    check(pool, stack=stack, micro=4 if stack in ("only_cp", "tp") else 2)


@CHECKPOINTS
@pytest.mark.parametrize("stack", ["tp", "fsdp_flattened"])
def test_dropout_is_that_of_the_undivided_call(pool, stack, reentrant):
    """Heads begin at the place in tp, sequences at the place in dp and the micro-batch."""
    check(pool, stack=stack, dropout_p=0.3, micro=2, reentrant=reentrant)


PIPELINE = {
    "contiguous": {"split": ("contiguous",)},
    "head_tail": {"split": ("head_tail",)},
    "striped": {"split": ("striped",), "mask": ("window", 4, 0)},
}


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [("contiguous", None), ("striped", None), ("head_tail", None), ("head_tail", False), ("head_tail", True)],
)
def test_pipeline_of_two_stages(pool, name, reentrant):
    """Two losses, and micro-batches of unlike counts in flight."""
    for errors in pool.run("pipeline_jobs:train", 4, reentrant=reentrant, **PIPELINE[name]):
        assert errors["loss"] <= EXACT, errors
        assert errors["gradients"] <= EXACT, errors


ORDERS = [
    "same_order",
    "reverse_order",
    "one_forward_one_backward",
    "forwards_without_backward",
    "two_losses_of_one_forward",
    "exception_before_the_ring",
    "exception_behind_the_ring",
    "exception_in_a_recomputation",
    "exception_on_one_rank",
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world", [2, 4])
def test_orders_of_forwards_and_backwards(pool, world, order):
    for errors in pool.run(f"order_jobs:{order}", world):
        assert max(errors) <= 1e-12, errors

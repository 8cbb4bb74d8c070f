"""ringspan.flex over ranks: mods see positions of the whole sequences, whatever the split."""

from __future__ import annotations

import pytest

from ringspan import names

EXCHANGES = names.EXCHANGES[1:]  # without auto
SPLITS = [("contiguous",), ("head_tail",), ("striped",), ("uneven",), ("by batch",)]
PAIRS = [
    ("causal", "positions"),
    ("documents by batch", "relative"),
    ("by batch and head", "bias, then factor"),
    ("empty rows", "by key"),
    ("random", "by query, in two steps"),
    ("everything", "bias, then mask"),
    ("prefix by batch", "mask, then bias"),
    ("sink tokens and window", "negative softcap"),
    ("chunked", "alibi"),
]


@pytest.mark.parametrize("split", SPLITS, ids=[split[0] for split in SPLITS])
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gets_its_rows_of_the_whole(pool, world, split):
    """out, lse, gradients, and gradients of captured tensors summed over the ranks."""
    for rank, worst in enumerate(
        pool.run("flex_jobs:errors", world, split=split, pairs=PAIRS, exchange=EXCHANGES[world % 3])
    ):
        assert len(worst) == len(PAIRS)
        assert max(worst.values()) <= 1e-12, f"rank {rank}: {worst}"


@pytest.mark.parametrize("world", [2, 4])
def test_local_indices_would_be_seen(pool, world):
    """The score_mod told of places in the shards instead, as other libraries do without a word: off by more than 1."""
    for rank, (error, if_local) in enumerate(pool.run("flex_jobs:local_positions", world)):
        assert error <= 1e-12
        assert if_local > 1, f"rank {rank}"


def test_equal_shards_need_no_map(pool):
    assert max(pool.run("flex_jobs:without_a_map", 3)) <= 1e-12


def test_what_one_rank_refuses_all_refuse(pool):
    words = [
        "relu",
        "no such document",
        "Q_LEN 6 and KV_LEN 13",
        "mask",
        "mask",
        "scale",
        "bias",
        "SPEED",
    ]
    answers = pool.run("flex_jobs:refusals", 3)
    for told in answers:
        for message, word in zip(told, words, strict=True):
            assert word in message
    # The peers raise what the refusing rank does, where that is one of these two.
    for mine, theirs in zip(answers[2], answers[0], strict=True):
        kind = "NotImplementedError" if mine.startswith("NotImplementedError") else "ValueError"
        assert theirs.startswith(kind)
    assert answers[2][0].startswith("NotImplementedError")
    assert answers[2][1].startswith("KeyError")

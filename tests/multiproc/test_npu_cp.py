"""The contract's ops in a group: every mode, layout and per-logit input, on shards, equals the undivided call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from npu_cases import Call, kept, prefix_mask, upper
from test_npu_ops import tnd

from ringspan import names

EXCHANGES = names.EXCHANGES[1:]  # without auto
LIMITS = {"out": 1e-5, "max": 1e-5, "sum": 1e-5}


def splits_of(length: int, world: int) -> list[tuple]:
    """Contiguous, head-tail, striped, unequal with an empty rank, and a shuffle with padding rows."""
    lengths = [0] * world
    lengths[-1] = length
    order = np.random.default_rng(length).permutation(length)
    padded = tuple((*order[rank::world].tolist(), -1) for rank in range(world))
    return [("contiguous",), ("head_tail",), ("striped",), ("lengths", tuple(lengths)), ("positions", padded)]


def calls_of() -> dict[str, tuple[Call, bool]]:
    """A call for each thing that is split, and whether its mask is a full one."""
    source = np.random.default_rng(1)
    full = source.random((2, 1, 9, 13)) < 0.3
    causal = {"atten_mask": upper(), "sparse_mode": 3}
    sink = torch.tensor([8.0, -2.0, 0.5, 3.0], requires_grad=True)
    pse = torch.randn(1, 4, 9, 13, generator=torch.Generator().manual_seed(2)).requires_grad_()
    shared = torch.randn(2, 4, 1, 13, generator=torch.Generator().manual_seed(3)).requires_grad_()
    prefixes = np.stack([kept(6, 9, 13, prefix=length) for length in (13, 5)])
    packed = tnd([3, 0, 5], [4, 2, 5], 3, upper(), rows=2, columns=3)
    full_packed = tnd([4, 2, 3], [3, 5, 4], 1, torch.zeros(4, 5, dtype=torch.bool))
    banded = tnd([4, 2], [4, 6], 7, upper(), pre=6, nxt=-2)
    for call in (packed, full_packed, banded):
        call.arguments["softmax_layout"] = "TND"
    return {
        "left-up causal": (Call(keep=kept(2, 9, 13)[None], arguments={"atten_mask": upper(), "sparse_mode": 2}), False),
        "right-down causal": (Call(keep=kept(3, 9, 13)[None], layout="BSH", arguments=causal), False),
        "band": (Call(keep=kept(4, 9, 13, 3, 1)[None], layout="SBH", arguments={
            "atten_mask": upper(), "sparse_mode": 4, "pre_tockens": 3, "next_tockens": 1}), False),
        "prefix": (Call(keep=prefixes, arguments={
            "atten_mask": prefix_mask(), "sparse_mode": 6, "prefix": [13, 5]}), False),
        "full mask": (Call(bias=np.where(np.broadcast_to(full, (2, 4, 9, 13)), -np.inf, 0.0), layout="BSND", arguments={
            "atten_mask": torch.from_numpy(full), "sparse_mode": 1}), True),
        "pse and sink": (Call(pse=pse, sink=sink, keep=kept(3, 9, 13)[None], arguments=causal), False),
        "pse of columns": (Call(pse=shared, dtype="float32"), False),
        "dropout": (Call(keep=kept(3, 9, 13)[None], arguments=causal | {"keep_prob": 0.6}), False),
        "documents": (packed, False),
        "documents with a mask": (full_packed, False),
        "a band document": (banded, False),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls_of())
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_group_is_the_undivided_call(pool, world, name):
    call, full_mask = calls_of()[name]
    splits = splits_of(call.q_len, world)
    kv_splits = splits_of(call.kv_len, world)
    for index, split in enumerate(splits):
        kv_split = kv_splits[(index + world) % len(kv_splits)] if index % 2 else kv_splits[index]
        answers = pool.run(
            "npu_cp_jobs:errors", world, call=call, split=split, kv_split=kv_split,
            exchange=EXCHANGES[index % 3], full_mask=full_mask,
        )  # fmt: skip
        seeds = {answer.pop("seed") for answer in answers}
        assert len(seeds) == 1
        for answer in answers:
            for what, error in answer.items():
                assert error <= LIMITS.get(what, 5e-5), f"{what} off by {error} with {split} and {kv_split}"


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_group_refuses(pool, world):
    for layout, one_rank, differ, rows in pool.run("npu_cp_jobs:refusals", world):
        assert 'say "TND"' in layout
        assert "scale is nan" in one_rank
        assert "scale is 0.5 on rank 0, 1.5 on rank 1" in differ
        assert "rows" in rows

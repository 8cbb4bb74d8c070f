"""The support table against the product: every feature is exact in all combinations, every refusal is made."""

from __future__ import annotations

import itertools

import judge
import pytest
import torch
from cases import Case
from ringspan.names import DTYPES, LAYOUTS, SCHEDULES

import ringspan as rs
from ringspan import support

BASE = Case(("window", 5, 2), seq_len=13, batch=1, qk_dim=6, v_dim=5, seed=40)
SAMPLES = {
    "mask": BASE.but(mask=("and", ("causal",), ("ids", (1, 1, 2, 2, 2, 0, 1, 3, 3, 3, 3, 0, 1), ("full",)))),
    "shard_map": BASE.but(split=("positions", ((12, 3, -1, *range(3), *range(4, 12)),))),
    "kv_shard_map": BASE.but(kv_split=("contiguous",), kv_len=9),
    "attn_mask (bool)": BASE.but(attn_mask="NSK"),
    "attn_mask (float)": BASE.but(bias="BSK"),
    "bias (tensor)": BASE.but(bias="BNSK", seed=41),
    "bias (alibi)": BASE.but(alibi=(0.25, 0.5, 0.125, 1.0)),
    "sink": BASE.but(sink=(0.5, -1.0, 3.0, 0.25)),
    "softcap": BASE.but(softcap=1.5),
    "dropout_p": BASE.but(dropout=(0.4, 77, 5)),
    "return_stats": BASE.but(lse_grad=True),
}


def test_every_feature_has_a_sample():
    assert SAMPLES.keys() == support.FEATURES.keys()


@pytest.mark.parametrize("schedule", [*SCHEDULES, "hybrid:1x1", "double_ring:1x1"])
@pytest.mark.parametrize("feature", SAMPLES)
def test_every_combination(feature, schedule):
    combinations = itertools.product(LAYOUTS, DTYPES)
    cases = [SAMPLES[feature].but(layout=layout, dtype=dtype, schedule=schedule) for layout, dtype in combinations]
    judge.check(None, 1, cases)


def test_every_refusal_is_made():
    calls = {
        "alibi": lambda: rs.alibi(torch.ones(2, requires_grad=True)),
    }
    # `device`: test_bad_input.py, which has no other device but a fake one.
    assert calls.keys() | {"device"} == {entry.argument for entry in support.REFUSALS}
    for argument, call in calls.items():
        with pytest.raises(NotImplementedError, match=argument):
            call()

"""Bad arguments: the right exception, with both values, before anything runs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringspan as rs

Q, K, V = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 8)
HIDDEN = torch.randn(2, 8, 64)

BAD = {
    "no tensor": ({"query": [1.0]}, "list"),
    "query of 3 dimensions": ({"query": Q[0]}, "3 dimensions.*BNSD needs 4"),
    "key of 5 dimensions": ({"key": K[None]}, "5 dimensions.*needs 4"),
    "whole numbers": ({"query": Q.int()}, "int32"),
    "dtype mix": ({"key": K.double()}, "float64.*float32"),
    "half mix": ({"value": V.half()}, "float16.*float32"),
    "batch": ({"key": K[:1]}, "1.*2"),
    "heads that do not divide": ({"query": Q[:, :3]}, "3 heads.*2"),
    "heads of value": ({"value": V[:, :1]}, "1.*2"),
    "rows of value": ({"value": V[:, :, :5]}, "5.*8"),
    "head dim of key": ({"key": K[..., :8]}, "8.*16"),
    "head dim 0": ({"query": Q[..., :0], "key": K[..., :0]}, "0.*1..768"),
    "head dim 769": ({"value": torch.randn(2, 2, 8, 769)}, "769.*768"),
    "no heads": ({"query": Q[:, :0]}, "0"),
    "no key heads": ({"key": K[:, :0], "value": V[:, :0]}, "0"),
    "no batch": ({"query": Q[:0], "key": K[:0], "value": V[:0]}, "0"),
    "scale nan": ({"scale": float("nan")}, "nan"),
    "scale inf": ({"scale": float("inf")}, "inf"),
    "scale text": ({"scale": "big"}, "'big'"),
    "layout": ({"layout": "NBSD"}, "'NBSD'.*BNSD"),
    "num_heads differs": ({"num_heads": 2}, "2.*4"),
    "num_heads 0": ({"num_heads": 0}, "0"),
    "hidden without num_heads": ({"query": HIDDEN, "key": HIDDEN, "value": HIDDEN, "layout": "BSH"}, "num_heads"),
    "hidden not divided": (
        {"query": HIDDEN, "key": HIDDEN, "value": HIDDEN, "layout": "BSH", "num_heads": 5},
        "64.*5",
    ),
    "hidden of key": (
        {"query": HIDDEN, "key": HIDDEN[..., :20], "value": HIDDEN, "layout": "SBH", "num_heads": 4},
        "20.*16",
    ),
    "mask": ({"mask": "causal"}, "str"),
    "mask of another batch": ({"mask": rs.prefix([1, 2, 3])}, "3.*2"),
    "mask of other lengths": ({"mask": rs.documents(lengths=[5, 5])}, "10.*8|5.*8"),
    "negative document": ({"mask": rs.documents(lengths=torch.tensor([-1, 9]))}, "-1"),
    "negative prefix": ({"mask": rs.prefix(torch.tensor([-4]))}, "-4"),
    "shard map": ({"shard_map": 2}, "int"),
    "map of 2 ranks, no group": ({"shard_map": rs.ShardMap.contiguous(16, 2)}, "2 ranks.*1"),
    "map of other lengths": ({"shard_map": rs.ShardMap.contiguous(9, 1)}, "8.*9"),
    "group": ({"group": "world"}, "world"),
    "exchange": ({"exchange": "broadcast"}, "broadcast.*all_to_all"),
    "schedule": ({"schedule": "star"}, "star.*ring"),
    "offset": ({"offset": -1}, "-1"),
    "head_offset": ({"head_offset": 1.5}, "1.5"),
    "sink that is no tensor": ({"sink": [0.0] * 4}, "list"),
    "sink of other heads": ({"sink": torch.zeros(2)}, r"\[2\].*4 heads"),
    "sink of 2 dimensions": ({"sink": torch.zeros(4, 1)}, r"\[4, 1\].*4 heads"),
    "sink in 16 bits": ({"sink": torch.zeros(4, dtype=torch.bfloat16)}, "bfloat16.*float32"),
    "sink in fp64": ({"sink": torch.zeros(4, dtype=torch.float64)}, "float64.*float32"),
    "sink with nan": ({"sink": torch.tensor([0.0, float("nan"), 0, 0])}, "nan.*head 1"),
    "mask of another kind": ({"attn_mask": [True]}, "attn_mask is of list"),
    "mask of integers": ({"attn_mask": torch.ones(8, 8, dtype=torch.int64)}, "attn_mask.*int64"),
    "mask of other keys": ({"attn_mask": torch.ones(8, 9, dtype=torch.bool)}, r"\[8, 9\].*\[2, 4, 8, 8\]"),
    "mask of other heads": ({"attn_mask": torch.ones(3, 8, 8)}, r"\[3, 8, 8\].*\[2, 4, 8, 8\]"),
    "mask without axes": ({"attn_mask": torch.tensor(True)}, r"\[\].*\[2, 4, 8, 8\]"),
    "float mask in fp64": ({"attn_mask": torch.zeros(8, 8, dtype=torch.float64)}, "float64.*float32"),
    "bias of another kind": ({"bias": 3.0}, "bias is of float"),
    "boolean bias": ({"bias": torch.ones(8, 8, dtype=torch.bool)}, "bias is of torch.bool.*attn_mask"),
    "slopes of other heads": ({"bias": rs.alibi(torch.ones(3))}, r"\[3\].*4 heads"),
    "slopes in 16 bits": ({"bias": rs.alibi(torch.ones(4, dtype=torch.bfloat16))}, "bfloat16.*float32"),
    "softcap of 0": ({"softcap": 0.0}, "softcap is 0.0"),
    "softcap of inf": ({"softcap": float("inf")}, "softcap is inf"),
    "softcap of another kind": ({"softcap": "30"}, "softcap is '30'"),
    "dropout of 1": ({"dropout_p": 1.0}, "dropout_p is 1.0.*below 1"),
    "negative dropout": ({"dropout_p": -0.1}, "dropout_p is -0.1"),
    "dropout of nan": ({"dropout_p": float("nan")}, "dropout_p is nan"),
    "seed of another kind": ({"dropout_p": 0.1, "seed": 1.5}, "seed is 1.5"),
    "seed of 65 bits": ({"dropout_p": 0.1, "seed": 2**63}, "seed is 9223372036854775808"),
    "two seeds": ({"dropout_p": 0.1, "seed": torch.zeros(2, dtype=torch.int64)}, r"seed is torch.int64 \[2\]"),
    "seed in 32 bits": ({"dropout_p": 0.1, "seed": torch.zeros(1, dtype=torch.int32)}, "seed is torch.int32"),
    "negative offset": ({"dropout_p": 0.1, "offset": -1}, "offset is -1"),
    "head offset without a total": ({"dropout_p": 0.1, "head_offset": 4}, "head_offset is 4.*total_heads"),
    "total below the heads": ({"dropout_p": 0.1, "head_offset": 4, "total_heads": 7}, "total_heads is 7.*end at 8"),
    "sink of +inf": ({"sink": torch.tensor([0.0, 0, 0, float("inf")])}, "inf.*head 3"),
}


def call(**changes):
    arguments = {"query": Q, "key": K, "value": V, **changes}
    return rs.attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name):
    changes, pattern = BAD[name]
    with pytest.raises(ValueError, match=pattern):
        call(**changes)


def test_other_devices_are_refused():
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(NotImplementedError, match="device=xpu"):
        call(**{name: torch.empty(2, 2, 8, 16, device="xpu") for name in ("query", "key", "value")})


def test_zero_dropout_is_no_dropout():
    assert torch.equal(call(dropout_p=0.0, offset=3, head_offset=2, batch_offset=1), call())


def test_the_inner_op_checks_by_itself():
    """Whoever calls the dispatcher op without the front gets errors, not crashes."""
    op = torch.ops.ringspan.attention
    good = {
        "spec": [1, 1, 2, 8, 8, 0, 0, 0, 0, 0],
        "tables": [],
        "scale": 0.25,
        "layout": "BNSD",
        "num_heads": 4,
        "group_name": "",
    }
    op(Q, K, V, **good)
    for name, wrong in [
        ("sink", torch.zeros(3)),
        ("sink", torch.zeros(4, 1)),
        ("sink", torch.zeros(4, dtype=torch.float16)),
        ("sink", torch.full((4,), float("nan"))),
        ("sink", torch.full((4,), float("inf"))),
        ("spec", []),
        ("spec", [2, 1, 2, 8, 8, 0, 0, 0, 0, 0]),
        ("spec", [1, 1, 2, 8, 8, 0, 0, 0, 0]),
        ("spec", [1, 1, 2, 8, 8, 0, 0, 0, 0, 8]),
        ("spec", [1, 1, 2, 8, 8, 9, 0, 0, 0, 0]),
        ("spec", [1, 1, 2, 8, 8, 3, 0, 0, 0, 0]),
        ("spec", [1, 1, 2, 8, 8, 0, 0, 0, 0, 5, 3, 1, 0, 0, 0]),
        ("spec", [1, 2, 2, 16, 16, 0, 0, 0, 0, 0]),
        ("spec", [1, 1, 2, 9, 8, 0, 0, 0, 0, 0]),
        ("scale", float("nan")),
        ("scale", 1e39),
        ("softcap", 1e39),
        ("head_offset", 2**63 - 1),
        ("layout", "XYZ"),
        ("num_heads", 3),
        ("schedule", "star"),
        ("exchange", "broadcast"),
    ]:
        changes = {"dropout_p": 0.5, "seed": torch.tensor([1]), "total_heads": 4} if name == "head_offset" else {}
        with pytest.raises((ValueError, NotImplementedError)):
            op(Q, K, V, **{**good, **changes, name: wrong})

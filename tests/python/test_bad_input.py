"""Bad arguments: the right exception, with both values, before anything runs."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringspan as rs
from ringspan import flex

Q, K, V = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 8)
HIDDEN = torch.randn(2, 8, 64)
HALVES = {"query": Q.bfloat16(), "key": K.bfloat16(), "value": V.bfloat16()}
METAS = {"query": Q.to("meta"), "key": K.to("meta"), "value": V.to("meta")}

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
    "scale beyond fp32": ({"scale": 1e39}, r"scale is 1e\+39.*fp32"),
    "scale beyond fp32, bf16": ({**HALVES, "scale": -1e39}, r"scale is -1e\+39.*fp32.*bfloat16"),
    "scale beyond a double": ({"scale": 10**400}, "scale is a number of 1329 bits"),
    "softcap beyond fp32": ({"softcap": 1e39}, r"softcap is 1e\+39.*fp32"),
    "softcap beyond a double": ({"softcap": 10**400}, "softcap is a number of 1329 bits"),
    "softcap that is 0 in fp32": ({"softcap": 1e-50}, "softcap is 1e-50.*fp32"),
    "offset of 65 bits": ({"offset": 2**63}, r"offset is 9223372036854775808.*2\*\*63"),
    "batch_offset of 65 bits": ({"batch_offset": 2**63}, "batch_offset is 9223372036854775808"),
    "head_offset of 65 bits": ({"head_offset": 2**63}, "head_offset is 9223372036854775808"),
    "heads end beyond 64 bits": ({"head_offset": 2**63 - 1}, "head_offset is 9223372036854775807.*heads is 4"),
    "batch ends beyond 64 bits": ({"batch_offset": 2**63 - 1}, "batch_offset is 9223372036854775807.*entries is 2"),
    "no offset": ({"offset": None}, "offset is None"),
    "total_heads of 65 bits": ({"total_heads": 2**63}, "total_heads is 9223372036854775808"),
    "half a head": ({"total_heads": 2.5}, "total_heads is 2.5"),
    "total_heads of 0": ({"total_heads": 0}, "total_heads is 0"),
    "seed of -65 bits": ({"seed": -(2**63) - 1}, "seed is -9223372036854775809"),
    "num_heads text": ({"num_heads": "2"}, "num_heads is '2'"),
    "num_heads 2.5": ({"num_heads": 2.5}, "num_heads is 2.5"),
    "num_heads of 65 bits": ({"num_heads": 2**64}, "num_heads is 18446744073709551616.*4"),
    "assume_agreed text": ({"assume_agreed": "yes"}, "assume_agreed is 'yes'.*True or False"),
    "return_stats 1.5": ({"return_stats": 1.5}, "return_stats is 1.5.*True or False"),
    "layout 3": ({"layout": 3}, "layout is 3.*BNSD"),
    "no exchange": ({"exchange": None}, "exchange is None.*p2p"),
    "no schedule": ({"schedule": None}, "schedule is None.*ring"),
    "a mask's maker": ({"mask": rs.causal}, "mask is causal itself; call it"),
    "a mask's class": ({"mask": type(rs.causal())}, "mask is Causal itself; call it"),
    "no mask": ({"mask": None}, "mask is of NoneType"),
    "array": ({"query": Q.numpy()}, "query is of ndarray; give a tensor"),
    "text": ({"value": "v"}, "value is of str; give a tensor"),
    "key on meta": ({"key": K.to("meta")}, "key lies on meta, query on cpu"),
    "query on meta": ({"query": Q.to("meta")}, "key lies on cpu, query on meta"),
    "sink on meta": ({"sink": torch.zeros(4, device="meta")}, "sink lies on meta, query on cpu"),
    "mask on meta": ({"attn_mask": torch.ones(8, 8, device="meta")}, "attn_mask lies on meta, query on cpu"),
    "bias on meta": ({"bias": torch.ones(8, 8, device="meta")}, "bias lies on meta, query on cpu"),
    "slopes on meta": ({"bias": rs.alibi(torch.ones(4, device="meta"))}, "slopes lie on meta, query on cpu"),
    "seed on meta": (
        {"dropout_p": 0.1, "seed": torch.ones(1, dtype=torch.int64, device="meta")},
        "seed lies on meta, query on cpu",
    ),
    "sink on the CPU": ({**METAS, "sink": torch.zeros(4)}, "sink lies on cpu, query on meta"),
    "mask on the CPU": ({**METAS, "attn_mask": torch.ones(8, 8)}, "attn_mask lies on cpu, query on meta"),
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


def test_meta_tensors_give_shapes():
    assert call(**METAS, mask=rs.prefix(3), dropout_p=0.1, seed=3).shape == (2, 4, 8, 8)


def test_fp64_takes_what_fp32_does_not():
    doubles = {"query": Q.double() * 1e-39, "key": K.double(), "value": V.double()}
    assert torch.isfinite(call(**doubles, scale=1e39)).all()
    assert torch.isfinite(call(**doubles, softcap=1e39)).all()


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: rs.window(2**63), "left=9223372036854775808"),
        (lambda: rs.window(0, 2**63), "right=9223372036854775808"),
        (lambda: rs.window("3"), "left='3'"),
        (lambda: rs.chunked(2**63), "chunked.*9223372036854775808"),
        (lambda: rs.chunked(2.0), "chunked.*2.0"),
        (lambda: rs.prefix(2**63), "contains 9223372036854775808"),
        (lambda: rs.prefix(None), r"prefix\(lengths\) is None"),
        (lambda: rs.prefix("ab"), r"prefix\(lengths\) is 'ab'"),
        (lambda: rs.prefix(torch.ones(1, dtype=torch.int64, device="meta")), "lies on meta.*cpu"),
        (lambda: rs.documents(lengths=[2**63]), "contains 9223372036854775808"),
        (lambda: rs.documents(ids=[[1, 10**400]]), "contains a number of 1329 bits"),
        (lambda: rs.documents(lengths=7), r"documents\(lengths\) is 7"),
        (lambda: rs.bands([(0, 2**63, 0, 8, None, None)]), "contains 9223372036854775808"),
        (lambda: rs.bands([(0, 8, 0, 8, -(10**400), None)]), "contains a number of"),
        (lambda: rs.bands([(0, 8, 0, 8, 0.5, None)]), "contains 0.5"),
        (lambda: rs.bands([3]), "contains 3"),
        (lambda: rs.bands(None), "is None"),
        (lambda: rs.ShardMap.striped(2**63, 2), "seq_len is 9223372036854775808"),
        (lambda: rs.ShardMap.striped(8, "2"), "world_size is '2'"),
        (lambda: rs.ShardMap.from_lengths(7), "from_lengths.*7"),
        (lambda: rs.ShardMap.striped(8, 2).shard(torch.zeros(8), "0", 0), "rank '0'"),
        (lambda: rs.ShardMap.striped(8, 1).unshard([1.0], dim=0), "x is of list"),
        (lambda: rs.hybrid(ulysses=2.5, ring=2), "ulysses is 2.5"),
        (lambda: rs.masked_mean_loss([1.0], torch.ones(1, dtype=torch.bool)), "loss_per_token is of list"),
        (lambda: rs.masked_mean_loss(torch.ones(1), [True]), "valid is of list"),
        (lambda: rs.masked_mean_loss(torch.ones(1), torch.ones(1) > 0, averaged_by="2"), "averaged_by is '2'"),
        (lambda: rs.masked_mean_loss(torch.ones(1), torch.ones(1) > 0, step_valid=2**63), "step_valid is 92233"),
        (lambda: rs.masked_mean_loss(torch.ones(1), torch.ones(1, device="meta") > 0), "meta.*cpu"),
        (lambda: flex.flex_attention(Q, K, V, enable_gqa=True, scale="x"), "scale is 'x'"),
        (lambda: flex.flex_attention(Q, K, V, enable_gqa=True, scale=10**400), "scale is a number"),
        (lambda: rs.plan(Q.shape, K.shape, V.shape, scale=1e39), r"scale is 1e\+39"),
        (lambda: rs.plan(Q.shape, K.shape, V.shape, softcap=1e39), r"softcap is 1e\+39"),
        (lambda: rs.plan(Q.shape, K.shape, V.shape, world_size=2.5), "world_size is 2.5"),
        (lambda: rs.rank_mesh(1).check("cp", rs.LOCAL), "group is ringspan.LOCAL"),
    ],
)
def test_bad_numbers_elsewhere(make, pattern):
    with pytest.raises(ValueError, match=pattern):
        make()


@pytest.mark.parametrize(
    ("wide", "same"),
    [
        (rs.window(2**62, 2**63 - 1), rs.full()),
        (rs.window(1, 2**63 - 1), rs.window(1, None)),
        (rs.chunked(2**63 - 1), rs.causal()),
        (rs.bands([(0, 2**63 - 1, 0, 2**62, -(2**63), 2**63 - 1)]), rs.full()),
        (rs.prefix(2**63 - 1), rs.full()),
    ],
)
def test_masks_wider_than_any_sequence(wide, same):
    assert torch.equal(call(mask=wide), call(mask=same))


def test_this_process_alone():
    assert repr(rs.LOCAL) == "ringspan.LOCAL"
    assert copy.deepcopy(rs.LOCAL) is pickle.loads(pickle.dumps(rs.LOCAL)) is rs.LOCAL
    assert torch.equal(call(group=rs.LOCAL), call())
    assert torch.equal(flex.flex_attention(Q, K, V, enable_gqa=True, group=rs.LOCAL), call())
    x, smap = torch.randn(8, 2), rs.ShardMap.striped(8, 1)
    assert torch.equal(smap.unshard(x, group=rs.LOCAL, dim=0), x)
    assert rs.masked_mean_loss(torch.ones(3), torch.ones(3) > 0, group=rs.LOCAL)[1] == 1
    assert rs.plan(Q.shape, K.shape, V.shape, group=rs.LOCAL).world_size == 1
    with rs.count_traffic(rs.LOCAL) as traffic:
        call(group=rs.LOCAL)
    assert traffic.messages == 0


def test_a_map_beside_no_group_names_the_cause():
    for group in (None, rs.LOCAL):
        with pytest.raises(ValueError, match=rf"shard_map splits over 4 ranks, but group={group!r} is this process"):
            call(shard_map=rs.ShardMap.contiguous(32, 4), group=group)


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

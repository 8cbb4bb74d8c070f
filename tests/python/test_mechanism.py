"""ringspan.mechanism against dense attention in float64 by NumPy, for drawn shapes, parts and orders."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ringspan.mechanism import (
    context_parallel_attention_sim,
    estimate_ring_kv_communication,
    local_softmax_statistics,
    merge_softmax_statistics,
    split_sequence_contiguous,
)
from ringspan.mechanism.softmax import finish_softmax

from ringspan import mechanism

EPSILON = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
INF, NAN = float("inf"), float("nan")
SIZES = ("sequence_length", "hidden_size", "dtype_bytes", "cp_size")

untimed = settings(deadline=None)  # a busy machine is no fault
small = st.integers(1, 4)
batches = st.lists(st.integers(1, 3), max_size=3)
seeds = st.integers(0, 2**32 - 1)


def dense(scores: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, times the values; a row of -inf only gives 0."""
    peak = scores.max(axis=-1, keepdims=True)
    weight = np.exp(scores - np.where(np.isfinite(peak), peak, 0.0))
    total = weight.sum(axis=-1, keepdims=True)
    return np.divide(weight, total, out=np.zeros_like(weight), where=total > 0) @ value


def merge_all(parts: list) -> tuple:
    running = None
    for part in parts:
        running = merge_softmax_statistics(running, part)
    return running


def normal(generator: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(generator.standard_normal(shape))


@untimed
@given(batches, small, small, st.integers(0, 4), st.sampled_from([torch.int64, torch.bool, torch.bfloat16]))
def test_split_then_concatenate_is_the_identity(batch, parts, length, features, dtype):
    shape = (*batch, parts * length, features)
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    shards = split_sequence_contiguous(tensor, parts)
    assert [shard.shape[-2] for shard in shards] == [length] * parts
    assert torch.equal(torch.cat(shards, dim=-2), tensor)


@st.composite
def divided_scores(draw):
    """Scores of several parts of the keys, some of them masked, some large, and the values."""
    generator = np.random.default_rng(draw(seeds))
    batch, rows, dim = draw(batches), draw(small), draw(small)
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    scale = draw(st.sampled_from([1.0, 30.0, 1e4]))
    scores = generator.standard_normal((*batch, rows, sum(lengths))) * scale
    scores[generator.random(scores.shape) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = -np.inf
    value = generator.standard_normal((*batch, sum(lengths), dim))
    cuts = np.cumsum(lengths)[:-1]
    return scores, value, np.split(scores, cuts, axis=-1), np.split(value, cuts, axis=-2)


def group_at_random(parts: list, generator: np.random.Generator) -> tuple:
    """Merges neighbours, at any place, until one is left."""
    parts = list(parts)
    while len(parts) > 1:
        place = int(generator.integers(len(parts) - 1))
        parts[place : place + 2] = [merge_softmax_statistics(parts[place], parts[place + 1])]
    return parts[0]


@untimed
@given(divided_scores(), seeds)
def test_merging_in_any_order_and_grouping_is_dense_softmax(case, seed):
    scores, value, score_parts, value_parts = case
    if scores.shape[-1] == 0:
        return
    generator = np.random.default_rng(seed)
    parts = [
        local_softmax_statistics(torch.from_numpy(s), torch.from_numpy(v))
        for s, v in zip(score_parts, value_parts, strict=True)
    ]
    order = generator.permutation(len(parts))
    merged = group_at_random([parts[index] for index in order], generator)
    maximum, denominator, _ = (part.numpy() for part in merged)
    np.testing.assert_array_equal(maximum, scores.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(finish_softmax(merged).numpy(), dense(scores, value), rtol=1e-11, atol=1e-13)
    assert (denominator[np.isfinite(maximum)] >= 1).all()
    assert (denominator[np.isneginf(maximum)] == 0).all()


@untimed
@given(batches, st.tuples(small, small, small, small, small), seeds)
def test_the_simulation_is_dense_attention_with_its_gradients(batch, sizes, seed):
    parts, length, rows, dim, v_dim = sizes
    generator = np.random.default_rng(seed)
    shapes = [(rows, dim), (parts * length, dim), (parts * length, v_dim)]
    inputs = [normal(generator, *batch, *shape).requires_grad_() for shape in shapes]
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in inputs)
    dout = normal(generator, *batch, rows, v_dim)
    out = context_parallel_attention_sim(*inputs, cp_size=parts)
    out.backward(dout)
    expected = torch.softmax(q @ k.transpose(-1, -2) / dim**0.5, dim=-1) @ v
    expected.backward(dout)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(inputs, (q, k, v), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 12])
def test_every_dtype_keeps_its_own_accuracy(dtype, cp_size):
    """The rounding of a 16-bit type happens once, so it does not grow with the number of parts."""
    generator = np.random.default_rng(cp_size)
    q, k, v = (normal(generator, 2, rows, 8).to(dtype) for rows in (5, 12, 12))
    out = context_parallel_attention_sim(q, k, v, cp_size)
    assert out.dtype == dtype
    q, k, v = (tensor.double().numpy() for tensor in (q, k, v))
    expected = dense(q @ k.swapaxes(-1, -2) / 8**0.5, v)
    assert np.abs(out.double().numpy() - expected).max() <= 4 * EPSILON[dtype] * np.abs(v).max()


def test_batch_axes_broadcast():
    generator = np.random.default_rng(0)
    q, k, v = normal(generator, 2, 3, 4, 8), normal(generator, 1, 6, 8), normal(generator, 2, 1, 6, 5)
    out = context_parallel_attention_sim(q, k, v, 2)
    np.testing.assert_allclose(
        out.numpy(), dense(q.numpy() @ k.numpy().swapaxes(-1, -2) / 8**0.5, v.numpy()), rtol=1e-12
    )


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("size", [1e2, 1e6, 1e18])
def test_large_scores_stay_finite_and_right(size, cp_size):
    q = torch.tensor([[[size, 0.0]]], requires_grad=True)
    k = torch.tensor([[[1.0, 0.0], [0.5, 0.0], [-1.0, 0.0], [1.0, 7.0]]], requires_grad=True)
    v = torch.arange(8.0).reshape(1, 4, 2).requires_grad_()
    out = context_parallel_attention_sim(q, k, v, cp_size)
    np.testing.assert_allclose(out.detach().numpy(), [[[3.0, 4.0]]], rtol=1e-6)
    out.sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (q, k, v))


def test_half_precision_scores_beyond_its_range_are_computed():
    """100 * 100 * 16 is more than float16 can hold."""
    q = k = torch.full((1, 2, 16), 100.0, dtype=torch.float16)
    v = torch.tensor([[[1.0], [2.0]]], dtype=torch.float16)
    assert context_parallel_attention_sim(q, k, v, 2).flatten().tolist() == [1.5, 1.5]


@pytest.mark.parametrize("keys", [0, 3])
def test_a_part_without_keys_is_the_identity(keys):
    generator = np.random.default_rng(1)
    empty = local_softmax_statistics(torch.full((2, 4, keys), -INF), normal(generator, 2, keys, 3).float())
    assert [list(tensor.shape) for tensor in empty] == [[2, 4, 1], [2, 4, 1], [2, 4, 3]]
    assert (empty[0] == -INF).all()
    assert (empty[1] == 0).all()
    assert (empty[2] == 0).all()
    other = local_softmax_statistics(normal(generator, 2, 4, 5).float(), normal(generator, 2, 5, 3).float())
    for merged in (merge_softmax_statistics(empty, other), merge_softmax_statistics(other, empty)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(merged, other, strict=True))
    assert all(torch.equal(*pair) for pair in zip(merge_softmax_statistics(empty, empty), empty, strict=True))
    assert (finish_softmax(empty) == 0).all()


def test_gradients_of_masked_rows_are_zero():
    """Row 0 keeps nothing, row 1 only keys of the second part, row 2 keys of both."""
    scores = torch.tensor([[-INF] * 4, [-INF, -INF, 1.0, 2.0], [0.5, -INF, 2.0, -INF]], dtype=torch.float64)
    scores.requires_grad_()
    value = torch.arange(8, dtype=torch.float64).reshape(4, 2).requires_grad_()
    parts = [local_softmax_statistics(scores[:, :2], value[:2]), local_softmax_statistics(scores[:, 2:], value[2:])]
    out = finish_softmax(merge_all(parts))
    out.backward(torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]], dtype=torch.float64))
    probability = np.zeros((3, 4))
    probability[1, 2:] = np.exp([1, 2]) / np.exp([1, 2]).sum()
    probability[2, [0, 2]] = np.exp([0.5, 2]) / np.exp([0.5, 2]).sum()
    dout = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]])
    slope = dout @ value.detach().numpy().T
    expected = probability * (slope - (probability * slope).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores.grad.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(value.grad.numpy(), probability.T @ dout, atol=1e-12)
    np.testing.assert_allclose(out.detach().numpy(), probability @ value.detach().numpy(), atol=1e-12)


def test_each_statistic_has_its_own_derivative():
    scores = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.manual_seed(0)).requires_grad_()
    value = torch.randn(2, 4, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(local_softmax_statistics, (scores, value))


@untimed
@given(small, small, st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_the_ledger_grows_with_the_ranks_while_the_parts_shrink(length, hidden, dtype_bytes, doublings):
    sequence = length * 2**doublings
    rows = [
        estimate_ring_kv_communication(sequence, hidden, dtype_bytes, 2**doubling) for doubling in range(doublings + 1)
    ]
    for few, many in itertools.pairwise(rows):
        assert few["rounds"] < many["rounds"]
        assert few["total_payload_per_rank_bytes"] < many["total_payload_per_rank_bytes"]
        assert few["local_sequence_length"] > many["local_sequence_length"]
        assert few["payload_per_round_bytes"] > many["payload_per_round_bytes"]
    # All of K and V, without the part that a rank has from the beginning.
    everything = 2 * sequence * hidden * dtype_bytes
    assert all(row["total_payload_per_rank_bytes"] == everything - row["payload_per_round_bytes"] for row in rows)
    assert rows[0]["rounds"] == rows[0]["total_payload_per_rank_bytes"] == 0


def test_the_ledger_takes_whole_numbers_of_any_library():
    row = estimate_ring_kv_communication(np.int64(12), np.int32(5), 2, np.int64(3))
    assert row == {
        "local_sequence_length": 4,
        "rounds": 2,
        "payload_per_round_bytes": 80,
        "total_payload_per_rank_bytes": 160,
    }
    assert {type(value) for value in row.values()} == {int}


@settings(untimed, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([4, 16]), st.integers(1, 5), st.data())
def test_the_ledger_is_that_of_the_product(length, heads, dim, world, data):
    import ringspan as rs

    dtype, dtype_bytes = data.draw(st.sampled_from([(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)]))
    exchange = data.draw(st.sampled_from(["all_to_all", "p2p"]))
    sequence = length * world
    simple = estimate_ring_kv_communication(sequence, heads * dim, dtype_bytes, world)
    shape = (1, heads, sequence, dim)
    smap = rs.ShardMap.contiguous(sequence, world)
    plan = rs.plan(shape, shape, shape, dtype=dtype, mask=rs.full(), shard_map=smap, exchange=exchange)
    for rank in range(world):
        assert smap.local_rows(rank) == simple["local_sequence_length"]
        forward = plan.ledger().rank(rank).forward
        assert forward.sent_bytes == simple["total_payload_per_rank_bytes"]
        sending = [step for step in forward.steps if step.messages]
        assert len(sending) == simple["rounds"]
        assert all(sum(step.sent.values()) == simple["payload_per_round_bytes"] for step in sending)
        assert forward.messages == simple["rounds"]


def scores(*shape: int, fill: float = 0.5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, fill, dtype=dtype)


GOOD = local_softmax_statistics(scores(2, 3), scores(3, 4))
SPLIT, LOCAL, MERGE, ATTEND = (
    split_sequence_contiguous,
    local_softmax_statistics,
    merge_softmax_statistics,
    context_parallel_attention_sim,
)
BAD = {
    "split no tensor": (SPLIT, ([1, 2], 2), "tensor is a list"),
    "split one axis": (SPLIT, (scores(4), 2), r"\[4\].*2 axes"),
    "split empty": (SPLIT, (scores(2, 0, 3), 2), r"\[2, 0, 3\].*empty"),
    "split indivisible": (SPLIT, (scores(5, 3), 2), "5.*2.*1 left over"),
    "split 0": (SPLIT, (scores(4, 3), 0), "cp_size is 0.*>= 1"),
    "split negative": (SPLIT, (scores(4, 3), -2), "cp_size is -2"),
    "split bool": (SPLIT, (scores(4, 3), True), "cp_size is True"),
    "split float": (SPLIT, (scores(4, 3), 2.0), r"cp_size is 2\.0"),
    "split more ranks than positions": (SPLIT, (scores(4, 3), 8), "4.*8"),
    "local nan": (LOCAL, (scores(2, 3, fill=NAN), scores(3, 4)), "scores holds nan.*-inf"),
    "local inf": (LOCAL, (scores(2, 3, fill=INF), scores(3, 4)), "scores holds inf"),
    "local value inf": (LOCAL, (scores(2, 3), scores(3, 4, fill=-INF)), "value_shard holds -inf"),
    "local value nan": (LOCAL, (scores(2, 3, fill=-INF), scores(3, 4, fill=NAN)), "value_shard holds nan"),
    "local keys": (LOCAL, (scores(2, 3), scores(4, 4)), r"\[2, 3\].*\[4, 4\]"),
    "local batch": (LOCAL, (scores(2, 2, 3), scores(5, 3, 4)), r"\[2\].*\[5\]"),
    "local integers": (LOCAL, (torch.ones(2, 3, dtype=torch.int64), scores(3, 4)), "int64.*float32"),
    "local complex": (LOCAL, (scores(2, 3, dtype=torch.complex64), scores(3, 4)), "complex64"),
    "local dtypes": (LOCAL, (scores(2, 3, dtype=torch.float64), scores(3, 4)), "float64.*float32"),
    "local overflow": (LOCAL, (scores(2, 3), scores(3, 4, fill=3e38)), "numerator.*inf"),
    "merge none": (MERGE, (None, None), "local is NoneType"),
    "merge two": (MERGE, (None, GOOD[:2]), "local is 2 items"),
    "merge rows": (MERGE, (GOOD, tuple(part[:1] for part in GOOD)), r"\[2, 1\].*\[1, 1\]"),
    "merge Dv": (MERGE, (GOOD, (*GOOD[:2], GOOD[2][:, :3])), r"numerator.*\[2, 4\].*\[2, 3\]"),
    "merge within": (MERGE, (None, (GOOD[0], GOOD[1][:1], GOOD[2])), r"\[2, 1\], \[1, 1\], \[2, 4\]"),
    "merge dtypes": (MERGE, (GOOD, tuple(part.double() for part in GOOD)), "float32.*float64"),
    "merge integers": (MERGE, (GOOD, tuple(part.long() for part in GOOD)), "int64"),
    "merge nan": (MERGE, (GOOD, (GOOD[0] * NAN, *GOOD[1:])), "maximum of local holds nan"),
    "merge inf": (MERGE, ((GOOD[0] + INF, *GOOD[1:]), GOOD), "maximum of running holds inf"),
    "merge denominator": (MERGE, ((GOOD[0], GOOD[1] * INF, GOOD[2]), GOOD), "denominator of running holds inf"),
    "merge negative": (MERGE, (GOOD, (GOOD[0], -GOOD[1], GOOD[2])), "denominator of local holds -3"),
    "merge no identity": (MERGE, (GOOD, (GOOD[0] - INF, *GOOD[1:])), "local has maximum -inf"),
    "merge overflow": (MERGE, ((GOOD[0], GOOD[1], GOOD[2] * 2e38 / 1.5),) * 2, "merged numerator holds inf"),
    "attend indivisible": (ATTEND, (scores(4, 2), scores(6, 2), scores(6, 2), 4), "6.*4"),
    "attend lengths": (ATTEND, (scores(4, 2), scores(6, 2), scores(4, 2), 2), r"key has shape \[6, 2\].*\[4, 2\]"),
    "attend features": (ATTEND, (scores(4, 2), scores(6, 3), scores(6, 2), 2), r"query has shape \[4, 2\].*\[6, 3\]"),
    "attend batch": (ATTEND, (scores(2, 4, 2), scores(3, 6, 2), scores(3, 6, 2), 2), r"\[2\].*\[3\]"),
    "attend no keys": (ATTEND, (scores(4, 2), scores(0, 2), scores(0, 2), 1), r"\[0, 2\].*empty"),
    "attend no queries": (ATTEND, (scores(0, 2), scores(6, 2), scores(6, 2), 1), r"query has shape \[0, 2\]"),
    "attend no features": (ATTEND, (scores(4, 0), scores(6, 0), scores(6, 2), 1), r"query has shape \[4, 0\]"),
    "attend integers": (ATTEND, (torch.ones(4, 2, dtype=torch.int32),) * 3 + (2,), "int32"),
    "attend nan": (ATTEND, (scores(4, 2, fill=NAN), scores(6, 2), scores(6, 2), 2), "query holds nan"),
    "attend inf": (ATTEND, (scores(4, 2), scores(6, 2, fill=-INF), scores(6, 2), 2), "key holds -inf"),
    "attend dtypes": (ATTEND, (scores(4, 2), scores(6, 2, dtype=torch.float16), scores(6, 2), 2), "float32.*float16"),
    "attend score": (ATTEND, (scores(1, 2, fill=1e30), scores(2, 2, fill=-1e30), scores(2, 2), 2), "key.*-inf"),
    "attend cp_size": (ATTEND, (scores(4, 2), scores(6, 2), scores(6, 2), None), "cp_size is None"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_both_values(name):
    function, arguments, pattern = BAD[name]
    with pytest.raises(ValueError, match=pattern):
        function(*arguments)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, None, np.float64(4)])
def test_sizes_of_the_ledger_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value!r}")):
        estimate_ring_kv_communication(**{**dict.fromkeys(SIZES, 4), name: value})


def test_the_ledger_refuses_parts_of_unequal_length():
    with pytest.raises(ValueError, match=r"1024.*3.*1 left over"):
        estimate_ring_kv_communication(1024, 4096, 2, 3)


def test_the_package_exports_the_five_functions():
    assert set(mechanism.__all__) == {
        "split_sequence_contiguous",
        "local_softmax_statistics",
        "merge_softmax_statistics",
        "context_parallel_attention_sim",
        "estimate_ring_kv_communication",
    }

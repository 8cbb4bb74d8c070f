"""fusion_attention_v3 and its gradient against the oracle: layouts, modes, masks, documents, pse, sink, dropout."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
import torch
from npu_cases import Call, documents, kept, prefix_mask, statistics, upper

import ringspan  # noqa: F401  registers the ops

OPS = torch.ops.ringspan
LAYOUTS = ["BNSD", "BSND", "BSH", "SBH"]
# 9 rows of 4 heads over 2 KV heads take the kernel for at most 32 rows of a KV head, over 1 the kernel for more.
KERNELS = pytest.mark.parametrize("kv_heads", [2, 1], ids=["few rows", "many rows"])
LIMITS = {"float32": (1e-5, 5e-5), "bfloat16": (2.0**-7, 2.0**-6), "float16": (2.0**-10, 2.0**-9)}


def from_stats(x: torch.Tensor, call: Call) -> np.ndarray:
    """[B, N, S] of the op's statistics; all eight slots are equal."""
    assert x.dtype == torch.float32
    assert torch.equal(x, x[..., :1].expand(x.shape))
    assert x.is_contiguous()
    if call.layout != "TND":
        assert tuple(x.shape) == (call.batch, call.q_heads, call.q_len, 8)
        return x[..., 0].double().numpy()
    assert tuple(x.shape) == (call.q_len, call.q_heads, 8)
    if call.arguments.get("softmax_layout") == "TND":
        return x[..., 0].transpose(0, 1)[None].double().numpy()
    lengths = np.diff([0, *call.arguments["actual_seq_qlen"].tolist()]).clip(min=0).tolist()
    flat, rows, at = x.reshape(-1), [], 0
    for length in [*lengths, call.q_len - sum(lengths)]:
        count = length * call.q_heads * 8
        rows.append(flat[at : at + count].reshape(call.q_heads, length, 8))
        at += count
    return torch.cat(rows, 1)[None, ..., 0].double().numpy()


def check(call: Call, forward=OPS.fusion_attention_v3, **more) -> None:
    """Forward, statistics, gradients by autograd and by the gradient op."""
    expected, keywords, leaves = call.expect(), call.keywords(), call.leaves()
    out_limit, grad_limit = LIMITS[call.dtype]
    results = forward(*leaves, call.q_heads, call.layout, **keywords, **more)
    out, softmax_max, softmax_sum, softmax_out, seed, offset = results
    assert out.dtype == softmax_out.dtype == leaves[0].dtype
    assert tuple(softmax_out.shape) == (0,)
    assert seed.dtype == offset.dtype == torch.int64
    assert tuple(seed.shape) == tuple(offset.shape) == (1,)
    assert oracle.error(call.out_of_layout(out, call.q_heads), expected.out) <= out_limit
    for got, right in zip((softmax_max, softmax_sum), statistics(expected, call), strict=True):
        assert oracle.error(from_stats(got.detach(), call), right) <= 1e-5
    dout = call.in_layout(torch.from_numpy(call.inputs()[3]).to(out.dtype)).contiguous()
    wanted = [*leaves, *[x for x in (call.pse, call.sink) if x is not None]]
    by_autograd = torch.autograd.grad(out, wanted, dout)
    names = {"scale": "scale_value"}
    direct = OPS.fusion_attention_grad_v3(
        *(x.detach() for x in leaves), dout, call.q_heads, call.layout,
        softmax_max=softmax_max, softmax_sum=softmax_sum, attention_in=out, seed=seed, offset=offset,
        **{names.get(key, key): value for key, value in keywords.items()},
    )  # fmt: skip
    heads = (call.q_heads, call.kv_heads, call.kv_heads)
    floors = (expected.dq_terms / 4, expected.dk_terms / 4, 0.0)
    for index, right in enumerate((expected.dq, expected.dk, expected.dv)):
        assert torch.equal(by_autograd[index], direct[index])
        got = call.out_of_layout(by_autograd[index], heads[index])
        assert oracle.error(got, right, None, floors[index]) <= grad_limit
    if call.pse is None:
        assert direct[3] is None
    else:
        axes = tuple(axis for axis in range(4) if call.pse.shape[axis] != expected.dbias.shape[axis])
        right = call.scale * expected.dbias.sum(axis=axes, keepdims=True)
        assert direct[3].dtype == call.pse.dtype
        assert direct[3].shape == call.pse.shape
        assert torch.equal(direct[3], by_autograd[3])
        assert oracle.error(direct[3].detach().double().numpy(), right, None, expected.dq_terms / 4) <= grad_limit
    assert direct[4].dtype == torch.float32
    if call.sink is None:
        assert tuple(direct[4].shape) == (0,)
    else:
        assert torch.equal(direct[4], by_autograd[-1])
        floor = expected.dsink_terms / 4
        assert oracle.error(direct[4].detach().double().numpy(), expected.dsink, None, floor) <= grad_limit


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("layout", LAYOUTS)
@KERNELS
def test_layouts_and_dtypes(layout, dtype, kv_heads):
    check(Call(layout=layout, dtype=dtype, kv_heads=kv_heads))
    arguments = {"atten_mask": upper(), "sparse_mode": 3}
    check(Call(layout=layout, dtype=dtype, kv_heads=kv_heads, arguments=arguments, keep=kept(3, 9, 13)[None]))


@pytest.mark.parametrize("sizes", [(9, 13), (13, 9), (1, 6), (6, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("mode", [2, 3])
def test_causal_modes(mode, sizes):
    call = Call(*sizes, keep=kept(mode, *sizes)[None], arguments={"atten_mask": upper(), "sparse_mode": mode})
    check(call)
    # The compressed mask may have leading axes, and its contents are not read.
    other = {"atten_mask": torch.zeros(1, 1, 2048, 2048, dtype=torch.uint8), "sparse_mode": mode}
    check(Call(*sizes, keep=call.keep, arguments=other))


def test_mode_without_a_mask_is_full():
    for mode in (0, 2, 3, 4):
        check(Call(arguments={"sparse_mode": mode, "pre_tockens": -5, "next_tockens": -7}))


@pytest.mark.parametrize("tokens", [(3, 1), (2, 0), (0, 4), (-2, 5), (7, -2), (2**31 - 1, 2**31 - 1)])
@KERNELS
def test_bands(tokens, kv_heads):
    for mode, sizes in ((0, (9, 13)), (4, (9, 13)), (4, (9, 9)), (0, (12, 7))):
        p, n = tokens if mode == 0 else (tokens[0] + sizes[0] - sizes[1], tokens[1] + sizes[1] - sizes[0])
        if (p < 0 and not (n >= -p and -p < sizes[1])) or (n < 0 and not (p >= -n and -n < sizes[0])):
            continue
        keep = kept(mode, *sizes, *tokens)[None]
        mask = torch.zeros(*sizes, dtype=torch.bool) if mode == 0 else upper()
        numbers = {"pre_tockens": tokens[0], "next_tockens": tokens[1]}
        arguments = {"atten_mask": mask, "sparse_mode": mode, **numbers}
        check(Call(*sizes, kv_heads=kv_heads, keep=keep, arguments=arguments))


@pytest.mark.parametrize("shape", [(9, 13), (1, 1, 9, 13), (2, 1, 9, 13), (2, 4, 9, 13)])
@pytest.mark.parametrize("mode", [0, 1, 5])
@KERNELS
def test_full_masks(mode, shape, kv_heads):
    if (mode == 5 and len(shape) != 4) or (mode == 5 and shape[0] == 1):
        return
    source = np.random.default_rng(5)
    masked = source.random(shape) < 0.4
    masked[..., 2, :] = True  # a row that keeps nothing
    masked[..., 5, :] = False
    arguments = {"atten_mask": torch.from_numpy(masked), "sparse_mode": mode}
    band = np.ones((9, 13), bool)
    if mode == 0:
        arguments |= {"pre_tockens": 4, "next_tockens": 3}
        band = kept(0, 9, 13, 4, 3)
    if mode == 5:
        arguments["prefix"] = [5, 4]
    full = np.broadcast_to(~masked & band, (2, 4, 9, 13))
    bias = np.where(full, 0.0, -np.inf)
    check(Call(bias=bias, kv_heads=kv_heads, arguments=arguments))
    as_bytes = torch.from_numpy(masked).to(torch.uint8) * (7 if mode == 1 else 1)
    arguments["atten_mask"] = as_bytes
    check(Call(bias=bias, kv_heads=kv_heads, dtype="bfloat16", arguments=arguments))


@pytest.mark.parametrize("sizes", [(9, 13), (13, 9), (9, 9)])
def test_prefix(sizes):
    q, k = sizes
    least = 0 if q > k else k - q
    prefix = [k, least]
    keep = np.stack([kept(6, q, k, prefix=length) for length in prefix])
    check(Call(q, k, keep=keep, arguments={"atten_mask": prefix_mask(), "sparse_mode": 6, "prefix": prefix}))


def tnd(q_lengths, kv_lengths, mode, mask=None, rows=0, columns=0, **numbers) -> Call:
    """A call of packed documents, with `rows` and `columns` more tokens behind them."""
    keep = documents(q_lengths, kv_lengths, mode, **numbers)
    keep = np.pad(keep, ((0, 0), (0, rows), (0, columns)))
    names = {"pre": "pre_tockens", "nxt": "next_tockens"}
    arguments = {names.get(name, name): value for name, value in numbers.items()}
    arguments |= {
        "actual_seq_qlen": torch.tensor(np.cumsum(q_lengths)),
        "actual_seq_kvlen": torch.tensor(np.cumsum(kv_lengths)),
        "sparse_mode": mode,
    }
    if mask is not None:
        arguments["atten_mask"] = mask
    return Call(sum(q_lengths) + rows, sum(kv_lengths) + columns, batch=1, layout="TND", keep=keep, arguments=arguments)


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_documents(softmax_layout):
    calls = [
        tnd([2, 2, 2], [2, 2, 2], 0),
        tnd([3, 0, 5], [4, 2, 5], 3, upper(), rows=2, columns=3),
        tnd([1, 1, 1], [1, 1, 1], 2, upper()),
        tnd([3, 4, 0], [3, 0, 2], 2, upper(), rows=1),
        tnd([3, 2], [5, 6], 4, upper(), pre=2, nxt=1),
        tnd([3, 2], [5, 6], 6, prefix_mask(), prefix=[4, 6]),
        tnd([4, 2], [4, 6], 7, upper(), pre=6, nxt=-2),
        tnd([3, 4, 0], [4, 4, 0], 8, upper(), pre=4, nxt=1),
        tnd([5], [3], 2, upper()),
    ]
    for call in calls:
        call.arguments["softmax_layout"] = softmax_layout
        check(call)
    # The worked examples of modes 7 and 8.
    assert np.array_equal(documents([2], [6], 7, pre=6, nxt=-2)[0], np.tril(np.ones((2, 6), bool), 2))
    assert np.array_equal(documents([3], [4], 8, pre=4, nxt=1)[0], np.tril(np.ones((3, 4), bool), 2))


def test_documents_with_a_full_mask():
    mask = np.random.default_rng(3).random((4, 5)) < 0.3
    call = tnd([4, 2, 3], [3, 5, 4], 1, torch.from_numpy(mask))
    at_q = at_kv = 0
    for rows, columns in ((4, 3), (2, 5), (3, 4)):
        call.keep[0, at_q : at_q + rows, at_kv : at_kv + columns] &= ~mask[:rows, :columns]
        at_q, at_kv = at_q + rows, at_kv + columns
    check(call)
    banded = tnd([4, 2, 3], [4, 5, 4], 0, torch.zeros(4, 5, dtype=torch.uint8), pre=1, nxt=2)
    check(banded)


def test_lengths_that_fall_switch_documents_off():
    plain = tnd([2, 3, 4], [2, 3, 4], 3, upper())
    dropped = tnd([2, 3, 4], [2, 3, 4], 3, upper())
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        dropped.arguments[name] = torch.tensor([2, 5, 9, 0, 0], dtype=torch.int32)
    leaves = plain.leaves()
    results = [OPS.fusion_attention_v3(*leaves, 4, "TND", **call.keywords()) for call in (plain, dropped)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(2, 4, 9, 13), (1, 4, 9, 13), (2, 4, 1, 13), (1, 4, 1, 13)])
@pytest.mark.parametrize("dtype", LIMITS)
@KERNELS
def test_pse(shape, dtype, kv_heads):
    pse = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype)).requires_grad_()
    given = {"pse": pse, "dtype": dtype, "kv_heads": kv_heads}
    check(Call(**given, arguments={"atten_mask": upper(), "sparse_mode": 2}, keep=kept(2, 9, 13)[None]))
    sink = torch.tensor([1.0, -2.0, 0.5, 3.0], requires_grad=True)
    check(Call(**given, sink=sink, layout="BSH"))


@pytest.mark.parametrize("layout", ["BNSD", "SBH", "TND"])
def test_sink(layout):
    sink = torch.tensor([8.0, -2.0, 0.5, 3.0], requires_grad=True)
    masked = np.zeros((1, 9, 13), bool)
    masked[0, 4] = True
    if layout == "TND":
        call = tnd([3, 4, 0], [3, 0, 2], 2, upper())
        call.sink = sink
        return check(call)
    arguments = {"atten_mask": torch.from_numpy(masked[0]), "sparse_mode": 1}
    return check(Call(layout=layout, sink=sink, keep=~masked, arguments=arguments))


@pytest.mark.parametrize(("layout", "kv_heads"), [*itertools.product(LAYOUTS, (2, 1)), ("TND", 2)])
def test_dropout(layout, kv_heads):
    def call_of(seed):
        if layout == "TND":
            call = tnd([4, 3], [5, 4], 0)
            dropped = np.zeros((1, 4, 7, 9), bool)
            dropped[:, :, :4, :5] = oracle.dropped_pairs(0.25, seed, 0, (1, 4, 4, 5))
            dropped[:, :, 4:, 5:] = oracle.dropped_pairs(0.25, seed, 0, (1, 4, 3, 4), first=4 * 4 * 5)
            call.dropped = dropped
        else:
            call = Call(layout=layout, kv_heads=kv_heads, dropped=oracle.dropped_pairs(0.25, seed, 0, (2, 4, 9, 13)))
        call.arguments["keep_prob"] = 0.75
        return call

    torch.manual_seed(11)
    results = OPS.fusion_attention_v3(*call_of(0).leaves(), 4, layout, **call_of(0).keywords())
    torch.manual_seed(11)
    check(call_of(int(results[4])))
    if layout != "TND":
        bits = OPS._dropout_gen_mask(results[0], [2, 4, 9, 13], 1 - 0.75, int(results[4]), int(results[5]))
        kept_bits = np.unpackbits(bits.numpy(), bitorder="little")[: 2 * 4 * 9 * 13].astype(bool)
        assert bits.shape == ((2 * 4 * 9 * 13 + 127) // 128 * 16,)
        assert np.array_equal(kept_bits.reshape(2, 4, 9, 13), ~call_of(int(results[4])).dropped)


def test_dropout_draws_again_and_a_checkpoint_does_not():
    from torch.utils.checkpoint import checkpoint

    call = Call(arguments={"keep_prob": 0.5})
    leaves = call.leaves()
    first, second = (OPS.fusion_attention_v3(*leaves, 4, "BNSD", **call.keywords())[0] for _ in range(2))
    assert not torch.equal(first, second)

    def body(q, k, v):
        return OPS.fusion_attention_v3(q * 2, k, v, 4, "BNSD", **call.keywords())[0].square().sum()

    gradients = []
    for wrap in (False, True):
        torch.manual_seed(4)
        loss = checkpoint(body, *leaves, use_reentrant=False) if wrap else body(*leaves)
        gradients.append(torch.autograd.grad(loss, leaves))
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_merged_statistics_give_the_whole_gradient():
    """A ring by hand: two halves of the keys, merged by ring_attention_update, then the gradient op on each."""
    call = Call(batch=2, q_len=6, kv_len=10, v_dim=8, layout="SBH")
    expected, leaves = call.expect(), [x.detach() for x in call.leaves()]
    q, k, v = leaves
    halves = [(k[:4], v[:4]), (k[4:], v[4:])]
    parts = [OPS.fusion_attention_v3(q, kk, vv, 4, "SBH", scale=call.scale)[:3] for kk, vv in halves]
    out, row_max, row_sum = OPS.ring_attention_update(*parts[0], *parts[1])
    assert oracle.error(call.out_of_layout(out, 4), expected.out) <= 1e-5
    dout = call.in_layout(torch.from_numpy(call.inputs()[3]).float()).contiguous()
    gradients = [
        OPS.fusion_attention_grad_v3(
            q,
            kk,
            vv,
            dout,
            4,
            "SBH",
            softmax_max=row_max,
            softmax_sum=row_sum,
            attention_in=out,
            scale_value=call.scale,
        )
        for kk, vv in halves
    ]
    dq = gradients[0][0] + gradients[1][0]
    assert oracle.error(call.out_of_layout(dq, 4), expected.dq) <= 5e-5
    for index, right in ((1, expected.dk), (2, expected.dv)):
        whole = torch.cat([gradients[0][index], gradients[1][index]])
        assert oracle.error(call.out_of_layout(whole, 2), right) <= 5e-5


def test_non_contiguous_inputs():
    call = Call()
    leaves = [x.detach() for x in call.leaves()]
    odd = [torch.stack([x, x], -1)[..., 0].transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    wide = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in leaves]
    right = OPS.fusion_attention_v3(*leaves, 4, "BNSD", scale=0.4)
    for inputs in (odd, wide):
        assert not inputs[0].is_contiguous()
        for one, other in zip(right, OPS.fusion_attention_v3(*inputs, 4, "BNSD", scale=0.4), strict=True):
            assert torch.equal(one, other)


def test_versions_1_and_2_are_the_same():
    call = tnd([3, 4], [3, 4], 3, upper())
    q, k, v = (x.detach() for x in call.leaves())
    third = OPS.fusion_attention_v3(q, k, v, 4, "TND", **call.keywords())
    lists = {name: [3, 7] for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    for op in (OPS.fusion_attention, OPS.fusion_attention_v2):
        results = op(q, k, v, 4, "TND", **(call.keywords() | lists))
        assert results[4:] == (0, 0, 0)
        for one, other in zip(third[:4], results[:4], strict=True):
            assert torch.equal(one, other)
    dy = torch.randn_like(third[0])
    saved = {"softmax_max": third[1], "softmax_sum": third[2], "attention_in": third[0]}
    arguments = {"scale_value": 0.4, "atten_mask": upper(), "sparse_mode": 3}
    lengths = {name: torch.tensor([3, 7]) for name in lists}
    right = OPS.fusion_attention_grad_v3(q, k, v, dy, 4, "TND", **saved, **arguments, **lengths)
    first = OPS.fusion_attention_grad(q, k, v, dy, 4, "TND", **saved, **arguments, **lists)
    second = OPS.fusion_attention_grad_v2(q, k, v, dy, 4, "TND", **saved, **arguments, **lists)
    assert len(first) == 5
    assert len(second) == 7
    assert second[4] is None
    assert second[5] is None
    for index in range(3):
        assert torch.equal(first[index], right[index])
        assert torch.equal(second[index], right[index])


@pytest.mark.parametrize("pse_type", [0, 1, 2, 3])
def test_pse_types_of_version_2(pse_type):
    call = Call(9, 9)
    distance = np.abs(np.arange(9)[None, :] - np.arange(9)[:, None] - 3 + 5).astype(float)
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    pse = torch.randn(2, 4, 9, 9)
    by_slope = slopes.double().numpy()[None, :, None, None] * (np.sqrt(distance) if pse_type == 3 else distance)
    call.bias = {0: pse.double().numpy(), 1: 0.4 * pse.double().numpy()}.get(
        pse_type, np.broadcast_to(-by_slope, (2, 4, 9, 9))
    )
    expected = call.expect()
    given = {"pse": pse if pse_type < 2 else slopes, "pse_type": pse_type, "q_start_idx": [3], "kv_start_idx": [5]}
    leaves = call.leaves()
    if pse_type < 2:
        given["pse"].requires_grad_()
    results = OPS.fusion_attention_v2(*leaves, 4, "BNSD", scale=0.4, **given)
    assert oracle.error(results[0].detach().double().numpy(), expected.out) <= 1e-5
    dout = torch.from_numpy(call.inputs()[3]).float()
    wanted = [*leaves, given["pse"]] if pse_type < 2 else leaves
    gradients = torch.autograd.grad(results[0], wanted, dout)
    for got, right in zip(gradients[:3], (expected.dq, expected.dk, expected.dv), strict=True):
        assert oracle.error(got.double().numpy(), right) <= 5e-5
    if pse_type < 2:
        assert oracle.error(gradients[3].double().numpy(), expected.dbias * (1.0 if pse_type == 0 else 0.4)) <= 5e-5


def test_explicit_seeds_of_version_1_repeat():
    call = Call()
    leaves = [x.detach() for x in call.leaves()]
    first = OPS.fusion_attention(*leaves, 4, "BNSD", keep_prob=0.5, seed=7, offset=3)
    again = OPS.fusion_attention(*leaves, 4, "BNSD", keep_prob=0.5, seed=7, offset=3)
    assert first[4:] == (7, 3, 0)
    assert torch.equal(first[0], again[0])


@pytest.mark.parametrize("keep_prob", [0.9, 0.8, 0.5, 0.123])
def test_both_ways_to_say_p_drop_the_same(keep_prob):
    tensor = torch.zeros(1)
    as_float32 = float(np.float32(1) - np.float32(keep_prob))
    one, other = (OPS._dropout_gen_mask(tensor, [1000, 1000], p, 2, 0) for p in (1 - keep_prob, as_float32))
    assert torch.equal(one, other)

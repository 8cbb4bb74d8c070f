"""Random calls of fusion_attention_v3, right and wrong ones: each is exact or refused, and none crashes.

    RINGSPAN_FUZZ=20000 RINGSPAN_SEED=1 pytest tests/python/test_npu_fuzz.py       more of them

What a call must answer is read off its arguments by the contract's definitions (npu_cases.py), not by asking the
product whether they are fine.
"""

from __future__ import annotations

import os
import random

import numpy as np
import oracle
import torch
from npu_cases import Call, documents, kept, prefix_mask, statistics, upper

import ringspan  # noqa: F401  registers the ops

OPS = torch.ops.ringspan
LIMITS = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}
LARGE = 2**31 - 1


def odd_strides(source: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The same values in other memory."""
    kind = source.randrange(4)
    if kind == 0 or x.dim() == 0:
        return x
    if kind == 1:
        return torch.stack([x, x], -1)[..., 1]
    if kind == 2:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def draw_call(source: random.Random) -> Call:
    """A call whose parts fit together most of the time."""
    layout = source.choice(["BNSD", "BSND", "BSH", "SBH", "TND", "TND"])
    kv_heads = source.choice([1, 2, 3])
    call = Call(
        source.randrange(12), source.randrange(12), 1 if layout == "TND" else source.choice([1, 2, 3]),
        kv_heads * source.choice([1, 2]), kv_heads, source.choice([1, 3, 8]), 1, source.choice(list(LIMITS)), layout,
        source.choice([0.4, 1.0, -0.3]), source.randrange(10**6),
    )  # fmt: skip
    call.v_dim = source.randint(1, call.qk_dim)
    mode = source.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]) if source.random() < 0.97 else source.choice([-1, 9])
    numbers = {"pre": source.choice([LARGE, 0, 3, 20, -2]), "nxt": source.choice([LARGE, 0, 2, -1, -3])}
    call.arguments = {"sparse_mode": mode, "pre_tockens": numbers["pre"], "next_tockens": numbers["nxt"]}
    lengths = None
    if layout == "TND":
        lengths = [[source.choice([0, 1, 2, 4]) for _ in range(source.choice([1, 2, 3]))] for _ in range(2)]
        if source.random() < 0.9:
            lengths[1] = (lengths[1] * 3)[: len(lengths[0])]
        if source.random() < 0.5:
            lengths[1] = [max(one, other) for one, other in zip(lengths[1], lengths[0], strict=False)]
        call.q_len, call.kv_len = (sum(side) + source.choice([0, 0, 2]) for side in lengths)
        call.arguments["actual_seq_qlen"], call.arguments["actual_seq_kvlen"] = (
            torch.tensor(np.cumsum(side)) for side in lengths
        )
        call.arguments["softmax_layout"] = "TND"
    add_mask(source, call, mode, lengths, numbers)
    add_terms(source, call)
    return call


def add_mask(source: random.Random, call: Call, mode: int, lengths: list | None, numbers: dict) -> None:
    """atten_mask, prefix, and what they keep; `keep` stays None where the call cannot be right."""
    with_mask = source.random() < 0.75
    sequences = [(call.q_len, call.kv_len)] * call.batch if lengths is None else list(zip(*lengths, strict=False))
    if mode in (5, 6) and with_mask and source.random() < 0.95:
        call.arguments["prefix"] = [
            source.randint(max(0, k - q), k) if k >= q else source.randint(0, k) for q, k in sequences
        ]
    most = tuple(max([pair[side] for pair in sequences], default=0) for side in (0, 1))
    full = None
    if with_mask and mode in (0, 1, 5):
        shape = most if lengths is not None else (call.q_len, call.kv_len)
        lead = source.choice([(), (1, 1), (call.batch, 1), (call.batch, call.q_heads)]) if lengths is None else ()
        if source.random() < 0.06:
            lead = source.choice([(1, call.q_heads + 1), (call.batch + 1, 1), (2,)])
        masked = torch.from_numpy(np.random.default_rng(call.seed).random((*lead, *shape)) < 0.3)
        call.arguments["atten_mask"] = odd_strides(source, masked.to(source.choice([torch.bool, torch.uint8])))
        full = masked.numpy()
    elif with_mask:
        mask = prefix_mask() if mode == 6 else upper()
        call.arguments["atten_mask"] = mask if source.random() < 0.95 else mask[:100]
    effective = mode if with_mask else 1
    if not 0 <= effective <= (8 if lengths else 6):
        return
    band = numbers if effective in (0, 4, 7, 8) else {}
    if lengths is None:
        prefixes = call.arguments.get("prefix") or [0] * call.batch
        call.keep = np.stack(
            [kept(effective, *pair, **band, prefix=prefix) for pair, prefix in zip(sequences, prefixes, strict=True)]
        )
        if full is not None and full.ndim in (2, 4):
            try:
                shape = (call.batch, call.q_heads, call.q_len, call.kv_len)
                call.bias = np.where(np.broadcast_to(full, shape), -np.inf, 0.0)
            except ValueError:
                call.keep = None
        return
    if len(lengths[0]) != len(lengths[1]):
        return
    if effective == 6:
        band = {"prefix": call.arguments.get("prefix") or [0] * len(lengths[0])}
    keep = documents(*lengths, effective, **band)
    if full is not None and full.ndim == 2:
        q = kv = 0
        for rows, columns in zip(*lengths, strict=True):
            keep[0, q : q + rows, kv : kv + columns] &= ~full[:rows, :columns]
            q, kv = q + rows, kv + columns
    call.keep = np.pad(keep, ((0, 0), (0, call.q_len - keep.shape[1]), (0, call.kv_len - keep.shape[2])))


def add_terms(source: random.Random, call: Call) -> None:
    """pse, sink, and now and then something that is wrong."""
    dtype = getattr(torch, call.dtype)
    if source.random() < 0.25:
        shape = (source.choice([1, call.batch]), call.q_heads, source.choice([1, call.q_len]), call.kv_len)
        call.pse = odd_strides(source, torch.randn(shape, generator=torch.Generator().manual_seed(call.seed)).to(dtype))
    if source.random() < 0.25:
        call.sink = torch.linspace(-2, 3, call.q_heads)
    wrong = {
        "keep_prob": source.choice([0.0, -1.0, 2.0]), "inner_precise": 5, "scale": float("inf"),
        "padding_mask": torch.zeros(1), "softmax_layout": "SBH", "prefix": [10**6],
        "sink": torch.zeros(call.q_heads + 1),
        "pse": torch.zeros(call.q_heads), "actual_seq_qlen": torch.tensor([10**6]), "atten_mask": torch.zeros(3, 3),
    }  # fmt: skip
    if source.random() < 0.1:
        name = source.choice(list(wrong))
        call.arguments[name] = wrong[name]
        if name == "pse":
            call.pse = None
        if name == "sink":
            call.sink = None
        call.keep = None


def check_refusal(error: RuntimeError) -> None:
    """Ours, or the dispatcher's: not of something that broke on the way."""
    assert "INTERNAL ASSERT" not in str(error)


def check(call: Call) -> bool:
    """Whether the call was accepted; asserts that it then is exact."""
    source = random.Random(call.seed)
    leaves = [odd_strides(source, x.detach()) for x in call.leaves()]
    # Where heads share an axis with the head dim, another number may be another call.
    wrong_heads = 0 if call.layout in ("BSH", "SBH") else call.q_heads + 1
    heads = call.q_heads if source.random() < 0.97 else source.choice([0, wrong_heads])
    keywords = call.keywords()
    try:
        results = OPS.fusion_attention_v3(*leaves, heads, call.layout, **keywords)
    except RuntimeError as error:
        check_refusal(error)
        return False
    assert call.keep is not None, f"accepted: {call}"
    expected = call.expect()
    assert oracle.error(call.out_of_layout(results[0], call.q_heads), expected.out) <= LIMITS[call.dtype], call
    for x, right in zip(results[1:3], statistics(expected, call), strict=True):
        own = x[..., 0] if call.layout != "TND" else x[..., 0].transpose(0, 1)[None]
        assert oracle.error(own.double().numpy(), right) <= 2e-5, call
    dout = call.in_layout(torch.from_numpy(call.inputs()[3]).to(results[0].dtype))
    renamed = {{"scale": "scale_value"}.get(name, name): value for name, value in keywords.items()}
    gradients = OPS.fusion_attention_grad_v3(
        *leaves, odd_strides(source, dout), heads, call.layout, softmax_max=results[1], softmax_sum=results[2],
        attention_in=results[0], **renamed,
    )  # fmt: skip
    limit = 5 * LIMITS[call.dtype]
    floors = (expected.dq_terms / 4, expected.dk_terms / 4, 0.25)
    for x, right, count, floor in zip(
        gradients,
        (expected.dq, expected.dk, expected.dv),
        (call.q_heads, call.kv_heads, call.kv_heads),
        floors,
        strict=False,
    ):
        assert oracle.error(call.out_of_layout(x, count), right, None, floor) <= limit, call
    return True


def test_random_calls_are_exact_or_refused():
    draws, first = int(os.environ.get("RINGSPAN_FUZZ", "1500")), int(os.environ.get("RINGSPAN_SEED", "1"))
    accepted = sum(check(draw_call(random.Random(first + index))) for index in range(draws))
    assert draws < 100 or draws * 0.3 < accepted < draws * 0.9, accepted


def test_random_merges_are_exact_or_refused():
    """ring_attention_update with shapes of every kind."""
    source = random.Random(7)
    accepted = 0
    for _ in range(600):
        size = [source.choice([0, 1, 2, 3, 8]) for _ in range(4)]
        layout = source.choice(["SBH", "TND", "BSH"])
        out = torch.randn(size[0], size[1], size[2] * (size[3] if layout == "SBH" else 1))
        shape = (size[1], size[2], size[0], 8) if layout == "SBH" else (size[0], size[1], 8)
        stats = [torch.rand(shape) + 0.5 for _ in range(4)]
        if source.random() < 0.2:
            stats[source.randrange(4)] = torch.rand(source.choice([(2, 8), (1,), (), (3, 3, 3, 8)]))
        ends = torch.tensor(sorted([0, size[0], source.randint(0, 8)]))
        try:
            results = OPS.ring_attention_update(
                out, stats[0], stats[1], out, stats[2], stats[3], actual_seq_qlen=source.choice([None, ends]),
                input_layout=layout, input_softmax_layout=source.choice(["", "TND", "SBH", "X"]),
            )  # fmt: skip
        except RuntimeError as error:
            check_refusal(error)
            continue
        accepted += 1
        # Two sides with the same out give that out, whatever their weights are.
        torch.testing.assert_close(results[0], out, atol=1e-5, rtol=1e-5)
    assert accepted > 60

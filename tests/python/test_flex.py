"""ringspan.flex on one rank: against FlexAttention's definition (flex_cases) and against PyTorch's own on the CPU."""

from __future__ import annotations

import inspect

import flex_cases
import pytest
import torch
from flex_cases import BATCH, HEADS, INF, MASKS, SCORE_MODS, SEQ, score_mod
from ringspan.flex.grid import Pairs
from ringspan.flex.mods import read_score_mod
from torch.nn.attention import flex_attention as pytorch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan import flex


def kept(mask: rs.Mask | torch.Tensor, batch: int, heads: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Which pairs a converted mask keeps: with equal scores and one-hot values, those with a weight."""
    if isinstance(mask, torch.Tensor):
        return mask.expand(batch, heads, q_len, kv_len)
    q, k = torch.zeros(batch, heads, q_len, 1), torch.zeros(batch, heads, kv_len, 1)
    return rs.attention(q, k, torch.eye(kv_len).expand(batch, heads, -1, -1), mask=mask) > 0


def eager(*args, **kwargs):
    """PyTorch's FlexAttention in its plain form."""
    pytorch._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        return pytorch.flex_attention(*args, **kwargs)
    finally:
        pytorch._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got, expected, rtol=1e-12, atol=1e-12, equal_nan=False)


@pytest.mark.parametrize("name", MASKS)
def test_masks_keep_the_pairs_of_their_definition(name):
    expected = flex_cases.kept_pairs(MASKS[name], BATCH, HEADS, SEQ, SEQ)
    mask = flex.to_mask(MASKS[name], SEQ, SEQ, batch=BATCH, heads=HEADS)
    assert isinstance(mask, torch.Tensor) == (name in ("by head", "by batch and head"))
    assert torch.equal(kept(mask, BATCH, HEADS, SEQ, SEQ), expected)
    for block_size in (2, 4, 7, (3, 5), 256):
        blocks = create_block_mask(MASKS[name], BATCH, HEADS, SEQ, SEQ, device="cpu", BLOCK_SIZE=block_size)
        mask = flex.to_mask(blocks, SEQ, SEQ, batch=BATCH, heads=HEADS)
        assert torch.equal(kept(mask, BATCH, HEADS, SEQ, SEQ), expected)
    few = flex.to_mask(MASKS[name], SEQ, SEQ, batch=BATCH, heads=HEADS, max_bands=0)
    assert torch.equal(kept(few, BATCH, HEADS, SEQ, SEQ), expected)


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_other_lengths(name):
    """More keys than queries: what differs by batch entry is a tensor there."""
    expected = flex_cases.kept_pairs(MASKS[name], BATCH, HEADS, SEQ - 4, SEQ)
    mask = flex.to_mask(MASKS[name], SEQ - 4, SEQ, batch=BATCH, heads=HEADS)
    assert isinstance(mask, torch.Tensor) == ("by" in name.split())
    assert torch.equal(kept(mask, BATCH, HEADS, SEQ - 4, SEQ), expected)


def test_masks_of_many_forms_are_disjoint_bands():
    """Random unions of bands, one over the other: each pair in one band or in none, and few bands for few shapes."""
    i, j = torch.arange(31)[:, None], torch.arange(23)[None, :]
    for seed in range(150):
        source = torch.Generator().manual_seed(seed)
        matrix = torch.zeros(31, 23, dtype=torch.bool)
        for _ in range(seed % 5):
            row, height, column, width, low, high = torch.randint(0, 24, (6,), generator=source).tolist()
            part = (i >= row) & (i < row + height) & (j >= column) & (j < column + width)
            matrix ^= part & (j - i >= low - 20) & (j - i <= high - 5)
        mask = flex.to_mask(lambda b, h, q, kv, matrix=matrix: matrix[q, kv], 31, 23)
        table = mask.table if hasattr(mask, "table") else torch.tensor([[0, 31, 0, 23, -99, 99]])
        times = torch.zeros(31, 23, dtype=torch.int64)
        for q0, q1, k0, k1, lo, hi in table.tolist():
            times += (i >= q0) & (i < q1) & (j >= k0) & (j < k1) & (j - i >= lo) & (j - i <= hi)
        assert torch.equal(times, matrix.long())


@pytest.mark.parametrize(
    ("name", "most"),
    [("causal", 1), ("sliding window", 1), ("both sides", 1), ("documents", 4), ("prefix", 2), ("chunked", 4)],
)
def test_common_masks_are_few_bands(name, most):
    assert len(flex.to_mask(MASKS[name], SEQ, SEQ).table) == most


def test_chunks_do_not_change_a_mask(monkeypatch):
    whole = {name: flex.to_mask(mod, SEQ, SEQ, batch=BATCH, heads=HEADS) for name, mod in MASKS.items()}
    monkeypatch.setattr("ringspan.flex.grid.PAIRS_AT_ONCE", 2 * SEQ)
    for name, mod in MASKS.items():
        parts = flex.to_mask(mod, SEQ, SEQ, batch=BATCH, heads=HEADS)
        if hasattr(parts, "table"):
            assert torch.equal(parts.table, whole[name].table)
        assert torch.equal(*(kept(mask, BATCH, HEADS, SEQ, SEQ) for mask in (parts, whole[name])))
    mod, _ = score_mod("relative")
    q, k, *_ = flex_cases.inputs()
    chunked = flex.to_arguments(q, k, mod)["bias"]
    monkeypatch.undo()
    assert torch.equal(chunked, flex.to_arguments(q, k, mod)["bias"])


@pytest.mark.parametrize("name", MASKS)
def test_attention_under_masks(name):
    """out, lse and gradients against the definition; out and lse against PyTorch as well."""
    q, k, v, dout = flex_cases.inputs()
    keep = flex_cases.kept_pairs(MASKS[name], BATCH, HEADS, SEQ, SEQ)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = flex_cases.attend(*leaves, keep)
    grads = torch.autograd.grad(out, leaves, dout)
    blocks = create_block_mask(MASKS[name], BATCH, HEADS, SEQ, SEQ, device="cpu", BLOCK_SIZE=4)
    plain, aux = eager(q, k, v, block_mask=blocks, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert close(plain, out)
    assert close(aux.lse, lse)
    for mask in (MASKS[name], blocks, flex.to_mask(blocks, SEQ, SEQ, batch=BATCH, heads=HEADS)):
        got, got_lse = flex.flex_attention(*leaves, block_mask=mask, enable_gqa=True, return_lse=True)
        assert close(got, out)
        assert close(got_lse, lse)
        assert all(map(close, torch.autograd.grad(got, leaves, dout), grads))


@pytest.mark.parametrize("mask", ["documents by batch", "by batch and head"])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_attention_under_score_mods(name, mask):
    """As above, with the gradients of the tensors that the mod captures."""
    q, k, v, dout = flex_cases.inputs()
    mod, tables = score_mod(name)
    keep = flex_cases.kept_pairs(MASKS[mask], BATCH, HEADS, SEQ, SEQ)
    leaves = [*(x.clone().requires_grad_() for x in (q, k, v)), *tables]
    out, lse = flex_cases.attend(*leaves[:3], keep, mod, scale=0.4)
    grads = torch.autograd.grad(out, leaves, dout)
    got, aux = flex.flex_attention(
        *leaves[:3], mod, MASKS[mask], 0.4, True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    assert close(got, out)
    assert close(aux.lse, lse)
    assert all(map(close, torch.autograd.grad(got, leaves, dout), grads))
    with torch.no_grad():
        blocks = create_block_mask(MASKS[mask], BATCH, HEADS, SEQ, SEQ, device="cpu")
        assert close(eager(q, k, v, mod, blocks, 0.4, True), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    q, k, v, dout = (x.to(dtype) for x in flex_cases.inputs())
    _, tables = score_mod("bias, then factor")
    half = [x.detach().to(dtype).requires_grad_() for x in tables]

    def halved(s, b, h, q, kv):
        return 0.5 * (1.5 * torch.tanh(s / 1.5) + half[0][h, q - kv + SEQ - 1]) - 2

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = flex_cases.attend(*wide, torch.ones(SEQ, SEQ, dtype=torch.bool), halved)
    grads = torch.autograd.grad(expected, [*wide, *half], dout.double())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    got = flex.flex_attention(*leaves, halved, enable_gqa=True)
    unit = torch.finfo(dtype).eps
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=8 * unit, atol=8 * unit)
    for one, right in zip(torch.autograd.grad(got, [*leaves, *half], dout), grads, strict=True):
        torch.testing.assert_close(
            one.double(), right.double(), rtol=16 * unit, atol=16 * unit * float(right.abs().max())
        )


def test_what_is_added_to_masked_pairs_is_not_seen():
    """log gives nan and -inf where the mask keeps nothing."""
    q, k, v, _ = flex_cases.inputs()

    def log(s, b, h, q, kv):
        return s + torch.log((q - kv).double())

    keep = flex_cases.kept_pairs(lambda b, h, q, kv: q > kv, BATCH, HEADS, SEQ, SEQ)
    expected, _ = flex_cases.attend(q, k, v, keep, log)
    assert close(flex.flex_attention(q, k, v, log, lambda b, h, q, kv: q > kv, enable_gqa=True), expected)
    dense = keep & torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool)
    assert close(flex.flex_attention(q, k, v, log, dense, enable_gqa=True), expected)

    def inside(s, b, h, q, kv):
        return torch.where(q > kv, log(s, b, h, q, kv), -INF)

    assert close(flex.flex_attention(q, k, v, inside, enable_gqa=True), expected)


def test_in_modes_of_pytorch():
    q, k, v, dout = flex_cases.inputs()
    mod, tables = score_mod("bias in a part")
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *tables]

    def layer(q, k, v):
        return flex.flex_attention(q, k, v, mod, MASKS["by head"], enable_gqa=True)

    out = layer(q, k, v)
    grads = torch.autograd.grad(out, leaves, dout)
    again = checkpoint(layer, q, k, v, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again, leaves, dout), grads))
    with torch.inference_mode():
        assert torch.equal(layer(q, k, v), out)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(q.float(), k.float(), v.float())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), out, rtol=0.05, atol=0.05)


def test_arguments_say_what_was_found():
    q, k, _, _ = flex_cases.inputs()
    causal = flex.to_arguments(q, k, score_mod("causal")[0])
    assert causal["bias"] is None
    assert causal["attn_mask"] is None
    assert flex.to_arguments(q, k, score_mod("softcap")[0], scale=0.5) == {
        "scale": pytest.approx(0.5),
        "softcap": 1.5,
        "bias": None,
        "mask": rs.full(),
        "attn_mask": None,
    }
    shapes = {"positions": (1, 1, SEQ, SEQ), "relative": (1, HEADS, SEQ, SEQ), "by key": (BATCH, 1, 1, SEQ)}
    shapes["by query, in two steps"] = (1, 1, SEQ, 1)
    for name, shape in shapes.items():
        assert flex.to_arguments(q, k, score_mod(name)[0])["bias"].shape == shape


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("mod", ["causal", "every third", "by head", None])
def test_blocks_that_disagree_with_their_mask_mod(mod, full):
    """PyTorch's kernels skip blocks that are not listed, ask the mask_mod in partial ones, and not in full ones.

    Its plain form looks at the mask_mod alone, so it cannot judge here.
    """
    partial, whole = torch.zeros(16, 16, dtype=torch.bool), torch.zeros(16, 16, dtype=torch.bool)
    for row, column in ((0, 0), (1, 3), (1, 0), (3, 3)):
        partial[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = True
    for row, column in ((0, 2), (2, 1), (3, 0), (3, 2)):
        whole[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = full
    rule = MASKS["everything" if mod is None else mod]
    decided = flex_cases.kept_pairs(rule, BATCH, HEADS, SEQ, SEQ)
    expected = whole[:SEQ, :SEQ] | (partial[:SEQ, :SEQ] & decided)
    blocks = flex_cases.blocks_by_hand(full, None if mod is None else rule)
    mask = flex.to_mask(blocks, SEQ, SEQ, batch=BATCH, heads=HEADS)
    assert torch.equal(kept(mask, BATCH, HEADS, SEQ, SEQ), expected)
    q, k, v, _ = flex_cases.inputs()
    out, _ = flex_cases.attend(q, k, v, expected)
    assert close(flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True), out)


def test_a_block_mask_without_a_mask_mod():
    blocks = flex_cases.blocks_by_hand()
    blocks.mask_mod = None
    expected = kept(flex.to_mask(flex_cases.blocks_by_hand(), SEQ, SEQ), 1, 1, SEQ, SEQ)
    assert torch.equal(kept(flex.to_mask(blocks, SEQ, SEQ), 1, 1, SEQ, SEQ), expected)


def test_the_block_mask_that_pytorch_makes_for_none():
    q, k, v, _ = flex_cases.inputs()
    blocks = pytorch._create_empty_block_mask(q, k)
    assert flex.to_mask(blocks, SEQ, SEQ) == rs.full()
    got = flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    assert torch.equal(got, rs.attention(q, k, v))


def test_rows_of_a_rank():
    rows = torch.tensor([5, 2, -1, 12])
    for name in ("by head", "by batch and head"):
        expected = flex_cases.kept_pairs(MASKS[name], BATCH, HEADS, SEQ, SEQ)[:, :, rows.clamp(min=0)]
        blocks = create_block_mask(MASKS[name], BATCH, HEADS, SEQ, SEQ, device="cpu", BLOCK_SIZE=3)
        for mask in (MASKS[name], blocks):
            got = flex.to_mask(mask, SEQ, SEQ, batch=BATCH, heads=HEADS, rows=rows)
            assert torch.equal(got.expand_as(expected), expected)
            both = flex.to_mask(mask, SEQ, SEQ, batch=BATCH, heads=HEADS, rows=torch.stack([rows, rows.flip(0)]))
            assert torch.equal(both[1], expected.flip(2)[-1])


def test_return_values():
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    out = flex.flex_attention(q, k, v)
    pair = flex.flex_attention(q, k, v, return_lse=True)
    assert isinstance(pair, tuple)
    assert torch.equal(pair[0], out)
    assert pair[1].shape == (BATCH, 2, SEQ)
    nothing = flex.flex_attention(q, k, v, return_aux=AuxRequest())[1]
    assert nothing == (None, None)
    _, aux = flex.flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert close(aux.max_scores, (q @ k.mT * 8**-0.5).amax(-1))
    ours, theirs = (list(inspect.signature(f).parameters) for f in (flex.flex_attention, pytorch.flex_attention))
    assert ours[: len(theirs)] == theirs


def test_empty_sequences():
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    mod, _ = score_mod("relative")
    none = flex.flex_attention(q[:, :, :0], k, v, mod, MASKS["causal"])
    assert none.shape == (BATCH, 2, 0, 8)
    assert (flex.flex_attention(q, k[:, :, :0], v[:, :, :0], mod, MASKS["causal"]) == 0).all()


def test_compiled_code():
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    mod, _ = score_mod("positions")
    expected = flex.flex_attention(q, k, v, mod, MASKS["causal"])

    def layer(q, k, v):
        return flex.flex_attention(q * 1.0, k, v, mod, MASKS["causal"]) + 0.0

    assert torch.equal(torch.compile(layer, backend="aot_eager")(q, k, v), expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="to_mask or to_arguments"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v)
    arguments = flex.to_arguments(q, k, mod, MASKS["causal"])
    whole = torch.compile(lambda q, k, v: rs.attention(q, k, v, **arguments), backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(q, k, v), expected)


KEY_ONLY = torch.randn(4, 6)
MODS_OF_SHARDS = {
    "of the key": (lambda s, b, h, q, k: s + KEY_ONLY[0, k], (1, 1, None, 6)),
    "of head and key": (lambda s, b, h, q, k: s + KEY_ONLY[h, k], (1, 4, None, 6)),
    "of entry and query": (lambda s, b, h, q, k: s + KEY_ONLY[b, q], (2, 1, "rows", 1)),
    "of all": (lambda s, b, h, q, k: s + KEY_ONLY[h, k] * q * b, (2, 4, "rows", 6)),
}


@pytest.mark.parametrize("name", MODS_OF_SHARDS)
@pytest.mark.parametrize("rows", [[], [3], [5, 0]])
@pytest.mark.parametrize("padded", [False, True])
def test_every_rank_sends_the_same_leading_sizes(name, rows, padded):
    """Whatever rows it holds: none, one, some; positions 0 where they are padding."""
    mod, sizes = MODS_OF_SHARDS[name]
    rows = torch.tensor(rows, dtype=torch.int64)
    rows = torch.zeros_like(rows) if padded else rows
    form, mask = read_score_mod(mod, Pairs(2, 4, 6, 6, rows), torch.float32)
    expected = tuple({None: 1, "rows": len(rows)}.get(size, size) for size in sizes)
    assert mask is None
    assert form.added.shape == expected


@pytest.mark.parametrize("rows", [[], [3], [5, 0]])
def test_every_rank_sends_the_same_leading_sizes_of_a_mask(rows):
    rows = torch.tensor(rows, dtype=torch.int64)
    for mod, leading in (
        (lambda b, h, q, k: (q >= k) & (q - k <= h), (1, 4)),
        (lambda b, h, q, k: (q >= k) & (q - k <= h) & (k != b), (2, 4)),
    ):
        mask = flex.to_mask(mod, 6, 6, batch=2, heads=4, rows=rows)
        assert mask.shape == (*leading, len(rows), 6)
        lists = flex.to_mask(mod, 6, 6, batch=2, heads=4, rows=rows.expand(2, -1))
        assert lists.shape == (2, 4, len(rows), 6)

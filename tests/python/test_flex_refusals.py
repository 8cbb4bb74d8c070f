"""What ringspan.flex refuses: score_mods without an exact form, BlockMasks that do not fit, bad calls."""

from __future__ import annotations

import math

import flex_cases
import pytest
import torch
from flex_cases import BATCH, HEADS, INF, MASKS, SEQ
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

import ringspan as rs
from ringspan import flex


class Doubled(torch.autograd.Function):
    """Twice its argument, with a gradient of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


FACTOR = torch.tensor(2.0, requires_grad=True)
REFUSED = {
    "relu": (lambda s, b, h, q, kv: torch.relu(s), "relu"),
    "method": (lambda s, b, h, q, kv: s.sigmoid(), "sigmoid"),
    "clamp": (lambda s, b, h, q, kv: s.clamp(max=3.0), "clamp"),
    "power": (lambda s, b, h, q, kv: s**2, "pow"),
    "square": (lambda s, b, h, q, kv: s * s, "mul.*both sides"),
    "sum": (lambda s, b, h, q, kv: s + torch.tanh(s), "add.*both sides"),
    "divisor": (lambda s, b, h, q, kv: torch.tensor(1.0) / s, "div.*divisor"),
    "division by 0": (lambda s, b, h, q, kv: s / 0, "div.*0"),
    "factor by head": (lambda s, b, h, q, kv: s * (h + 1), "mul.*differs between pairs"),
    "divisor by query": (lambda s, b, h, q, kv: s / (q + 1), "div.*differs between pairs"),
    "factor with a gradient": (lambda s, b, h, q, kv: s * FACTOR, "mul.*gradient"),
    "factor nan": (lambda s, b, h, q, kv: s * float("nan"), "mul.*nan"),
    "bias before softcap": (lambda s, b, h, q, kv: torch.tanh(s + 0.1 * q), "tanh.*softcap comes first"),
    "mask before softcap": (lambda s, b, h, q, kv: torch.tanh(torch.where(q >= kv, s, -INF)), "tanh.*masked"),
    "two softcaps": (lambda s, b, h, q, kv: torch.tanh(torch.tanh(s)), "tanh.*before"),
    "softcap of 0": (lambda s, b, h, q, kv: 0 * torch.tanh(s), "softcap of 0"),
    "finite mask": (lambda s, b, h, q, kv: torch.where(q >= kv, s, -1e9), "where.*other than -inf"),
    "other values": (lambda s, b, h, q, kv: torch.where(q >= kv, s, 1.0 * kv), "where.*other than -inf"),
    "two factors": (lambda s, b, h, q, kv: torch.where(q >= kv, s, 2 * s), "where.*different factors"),
    "mask by score": (lambda s, b, h, q, kv: torch.where(s > 0, s, -INF), "gt"),
    "comparison": (lambda s, b, h, q, kv: s if s == 0 else -s, "eq"),
    "branch": (lambda s, b, h, q, kv: s if s else -s, "bool"),
    "number": (lambda s, b, h, q, kv: s + s.item(), "item"),
    "detach": (lambda s, b, h, q, kv: s.detach() + 1, "detach"),
    "rounding": (lambda s, b, h, q, kv: s.to(torch.bfloat16), "to.*bfloat16"),
    "in place": (lambda s, b, h, q, kv: s.add_(1), "add_"),
    "alpha": (lambda s, b, h, q, kv: torch.add(s, q, alpha=2), "add.*arguments"),
    "own gradient": (lambda s, b, h, q, kv: Doubled.apply(s), "custom_function"),
    "raw operator": (lambda s, b, h, q, kv: torch.ops.aten.mul_(s, 2), "mul_"),
    "as an index": (lambda s, b, h, q, kv: torch.ones(3)[s], "index|getitem"),
    "no score": (lambda s, b, h, q, kv: 1.0 * (q - kv), "does not appear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_score_mods(name):
    mod, words = REFUSED[name]
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    with pytest.raises(NotImplementedError, match=words):
        flex.flex_attention(q, k, v, mod)


def test_a_factor_without_a_gradient_to_keep():
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    with torch.no_grad():
        got = flex.flex_attention(q, k, v, REFUSED["factor with a gradient"][0])
    assert torch.equal(got, rs.attention(q, k, v, scale=2 / math.sqrt(8)))


def test_a_branch_on_an_index():
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    for arguments in (
        {"score_mod": lambda s, b, h, q, kv: s if q > kv else -s},
        {"block_mask": lambda b, h, q, kv: q > 3 and kv > q},
    ):
        with pytest.raises(RuntimeError, match="data-dependent control flow"):
            flex.flex_attention(q, k, v, **arguments)


def with_lists(**changes) -> BlockMask:
    blocks = flex_cases.blocks_by_hand()
    for name, value in changes.items():
        setattr(blocks, name, value)
    return blocks


BLOCKS = flex_cases.blocks_by_hand()
TWICE = BLOCKS.kv_indices.clone()
TWICE[0, 0, 1, 1] = 3
OUTSIDE = BLOCKS.kv_indices.clone()
OUTSIDE[0, 0, 3, 0] = 4
BAD_BLOCKS = {
    "counts": ({"kv_num_blocks": torch.tensor([[[1, 5, 0, 1]]])}, "5 blocks.*4"),
    "twice": ({"kv_indices": TWICE}, r"\[1, 3\] twice"),
    "outside": ({"kv_indices": OUTSIDE}, "column 4 of 4"),
    "in both": ({"full_kv_num_blocks": torch.tensor([[[1, 1, 1, 2]]])}, r"\[1, 0\].*full_kv_indices"),
    "rows": ({"BLOCK_SIZE": (5, 4)}, r"3 rows.*\[B, H, 3\]"),
    "batch": (
        {"kv_num_blocks": BLOCKS.kv_num_blocks.expand(3, 1, 4), "kv_indices": BLOCKS.kv_indices.expand(3, 1, 4, 4)},
        "3 batch.*2",
    ),
    "lengths": ({"seq_lengths": (16, SEQ)}, "Q_LEN 16 and KV_LEN 13.*13 queries and 13 keys"),
}


@pytest.mark.parametrize("name", BAD_BLOCKS)
def test_bad_block_masks(name):
    changes, words = BAD_BLOCKS[name]
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    with pytest.raises(ValueError, match=words):
        flex.flex_attention(q, k, v, block_mask=with_lists(**changes))


def test_a_sliced_block_mask():
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    blocks = create_block_mask(MASKS["causal"], BATCH, 2, SEQ, SEQ, device="cpu")
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        flex.flex_attention(q, k, v, block_mask=blocks[:, :1])


BAD_CALLS = {
    "heads without gqa": ({}, "4 heads.*2.*enable_gqa"),
    "two ways to ask": ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, "return_lse and return_aux"),
    "mask": ({"block_mask": 3}, "int.*BlockMask"),
    "float mask": ({"block_mask": torch.zeros(SEQ, SEQ)}, "float32.*to_mask"),
    "mask_mod of numbers": ({"block_mask": lambda b, h, q, kv: q - kv}, "int64.*bool"),
    "mask_mod of no tensor": ({"block_mask": lambda b, h, q, kv: True}, "bool for one pair"),
    "wide bias": ({"score_mod": lambda s, b, h, q, kv: s + torch.ones(3)}, r"float32 \[3\]"),
    "query": ({"query": torch.zeros(2, 4, 13).double()}, "3 dimensions"),
    "map": ({"shard_map": rs.ShardMap.contiguous(26, 2)}, "2 ranks.*1"),
    "map of other rows": ({"shard_map": rs.ShardMap.contiguous(14, 1)}, "13 rows.*14"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    changes, words = BAD_CALLS[name]
    q, k, v, _ = flex_cases.inputs()
    with pytest.raises(ValueError, match=words):
        flex.flex_attention(**{"query": q, "key": k, "value": v} | changes)


@pytest.mark.parametrize("rows", [torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64), torch.tensor([1, SEQ])])
def test_bad_rows(rows):
    with pytest.raises(ValueError, match="rows"):
        flex.to_mask(MASKS["by head"], SEQ, SEQ, batch=BATCH, heads=HEADS, rows=rows)


def test_kernel_options():
    q, k, v, _ = flex_cases.inputs(q_heads=2)
    options = {"BLOCK_M": 64, "bwd_BLOCK_N2": 16, "PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True, "BACKEND": "AUTO"}
    assert torch.equal(flex.flex_attention(q, k, v, kernel_options=options), flex.flex_attention(q, k, v))
    with pytest.raises(NotImplementedError, match=r"BACKEND.*'FLASH'"):
        flex.flex_attention(q, k, v, kernel_options={"BACKEND": "FLASH"})
    with pytest.raises(ValueError, match="SPLIT_KV"):
        flex.flex_attention(q, k, v, kernel_options={"SPLIT_KV": 4})

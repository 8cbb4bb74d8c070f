"""The contract's table of rejections, row by row (its numbers), and what it accepts although it looks wrong."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from npu_cases import prefix_mask, upper

import ringspan  # noqa: F401  registers the ops

OPS = torch.ops.ringspan
B, N, NK, SQ, SK, D = 2, 4, 2, 5, 7, 8


def qkv(dtype=torch.float32, layout="BNSD", **sizes):
    """query, key, value of the standard sizes."""
    size = {"B": B, "N": N, "NK": NK, "SQ": SQ, "SK": SK, "D": D, "DV": D, "NV": None, "SV": None, "BK": B} | sizes
    shapes = [
        (size["B"], size["N"], size["SQ"], size["D"]),
        (size["BK"], size["NK"], size["SK"], sizes.get("DK", size["D"])),
        (size["BK"], size["NV"] or size["NK"], size["SV"] or size["SK"], size["DV"]),
    ]
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    if layout == "TND":
        return [x[0].transpose(0, 1) for x in tensors]
    if layout == "BSH":
        return [x.transpose(1, 2).flatten(2) for x in tensors]
    return tensors


def forward(tensors=None, heads=N, layout="BNSD", **keywords):
    """A forward call of v3."""
    return lambda: OPS.fusion_attention_v3(*(tensors or qkv(layout=layout)), heads, layout, **keywords)


def tnd(q_ends=(2, 5), kv_ends=(3, 7), **keywords):
    """A call of two documents."""
    given = {
        "actual_seq_qlen": q_ends if q_ends is None or torch.is_tensor(q_ends) else torch.tensor(q_ends),
        "actual_seq_kvlen": kv_ends if kv_ends is None or torch.is_tensor(kv_ends) else torch.tensor(kv_ends),
    }
    return forward(layout="TND", **{k: v for k, v in given.items() if v is not None}, **keywords)


def grad(**changes):
    """A gradient call; `without` names what is left out."""
    q, k, v = qkv()
    stats = torch.ones(B, N, SQ, 8)
    keywords = {"softmax_max": stats, "softmax_sum": stats, "attention_in": q} | changes
    keywords = {name: value for name, value in keywords.items() if value is not None}
    dy, extra = keywords.pop("dy", q), keywords.pop("extra", ())
    return lambda: OPS.fusion_attention_grad_v3(q, k, v, dy, N, "BNSD", *extra, **keywords)


def ring(layout="SBH", **changes):
    """A ring update; shapes [S 4, B 2, H 8] or [T 4, N 2, D 8]."""
    out = torch.zeros(4, 2, 8)
    stats = torch.ones(2, 2, 4, 8) if layout.upper() == "SBH" else torch.ones(4, 2, 8)
    given = {"prev": out, "cur": out, "pm": stats, "ps": stats, "cm": stats, "cs": stats} | changes
    tensors = [given.pop(name) for name in ("prev", "pm", "ps", "cur", "cm", "cs")]
    return lambda: OPS.ring_attention_update(*tensors, input_layout=layout, **given)


def four(stats):
    """The same statistics on both sides."""
    return dict.fromkeys(("pm", "ps", "cm", "cs"), stats)


def twice():
    """A second derivative."""
    q, k, v = (x.requires_grad_() for x in qkv())
    out = OPS.fusion_attention_v3(q, k, v, N, "BNSD")[0]
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    dq.sum().backward()


def zeros(*shape, dtype=torch.bool):
    """A mask."""
    return torch.zeros(shape, dtype=dtype)


def mode(number, mask=None, **keywords):
    """A call with a sparse mode and its compressed mask."""
    return forward(sparse_mode=number, atten_mask=upper() if mask is None else mask, **keywords)


ENDS = torch.tensor([2, 5])
REJECTED = {
    1: [forward(heads=0), forward(heads=-1)],
    2: [forward(heads=3), forward(qkv(layout="TND"), 3, "TND", actual_seq_qlen=ENDS, actual_seq_kvlen=ENDS)],
    3: [forward(qkv(layout="BSH"), 5, "BSH")],
    4: [forward([x[0, 0] for x in qkv()]), forward([x[None] for x in qkv()]),
        forward([qkv()[0], qkv()[1][0], qkv()[2]]), forward([*qkv()[:2], qkv()[2][0]]), grad(dy=torch.zeros(5, 8))],
    5: [forward(qkv(layout="BSH")), forward(qkv(), N, "BSH")],
    6: [forward(qkv(), N, ""), forward(qkv(), N, "NBSD")],
    8: [forward(keep_prob=p) for p in (0.0, -0.5, 1.5, float("nan"))],
    9: [mode(-1), mode(7), mode(8), mode(9), forward(sparse_mode=9)],
    10: [tnd(sparse_mode=5, atten_mask=zeros(3, 4), prefix=[2, 3])],
    11: [forward(softmax_layout="BNSD"), forward(softmax_layout="TND"), tnd(softmax_layout="BNSD")],
    12: [tnd(q_ends=None), tnd(kv_ends=None), tnd(q_ends=None, kv_ends=None)],
    13: [tnd(q_ends=(2, 3, 5)), tnd(q_ends=torch.tensor([[2, 5]])),
         tnd(q_ends=torch.tensor([], dtype=torch.int64), kv_ends=torch.tensor([], dtype=torch.int64)),
         tnd(q_ends=torch.tensor([2.0, 5.0]))],
    14: [tnd(q_ends=(2, 6)), tnd(kv_ends=(3, 8))],
    15: [tnd(q_ends=torch.tensor([2, 5], device="meta"))],
    16: [forward([qkv(torch.float16)[0], *qkv()[1:]]), forward(qkv(torch.float64)), forward(qkv(torch.int32))],
    17: [forward(qkv(DK=6)), forward(qkv(DV=9)), forward(qkv(D=0, DV=0)), forward(qkv(D=769)),
         forward(qkv(DV=0))],
    18: [forward(qkv(N=6, NK=4), 6), forward(qkv(N=2, NK=4), 2)],
    19: [forward(qkv(BK=3)), forward(qkv(SV=6)), forward(qkv(NV=1))],
    20: [forward(atten_mask=zeros(SQ, SK, dtype=torch.float32)), forward(atten_mask=zeros(SQ, SK, dtype=torch.int32))],
    21: [forward(atten_mask=mask) for mask in (
        zeros(SK), zeros(1, SQ, SK), zeros(1, N, SQ, SK), zeros(B, N, SQ, 1), zeros(SQ + 1, SK), zeros(B, 2, SQ, SK),
        zeros(3, 1, SQ, SK))],
    22: [mode(number, zeros(SQ, SK)) for number in (2, 3, 4)] + [mode(2, zeros(B, 1, 2048, 2048))],
    23: [mode(6, prefix=[SK, SK])],
    25: [forward(atten_mask=zeros(SQ, SK), pre_tockens=-1, next_tockens=-1),
         forward(atten_mask=zeros(SQ, SK), pre_tockens=-3, next_tockens=2),
         forward(atten_mask=zeros(SQ, SK), pre_tockens=-7, next_tockens=9),
         forward(atten_mask=zeros(SQ, SK), pre_tockens=2, next_tockens=-3),
         forward(atten_mask=zeros(SQ, SK), pre_tockens=9, next_tockens=-5),
         mode(4, pre_tockens=1, next_tockens=-3)],
    26: [mode(6, prefix_mask()), mode(6, prefix_mask(), prefix=[SK]), mode(6, prefix_mask(), prefix=[SK, SK + 1]),
         mode(6, prefix_mask(), prefix=[1, SK]), mode(5, zeros(B, 1, SQ, SK)),
         mode(5, zeros(B, 1, SQ, SK), prefix=[9, 9]), mode(3, prefix=[SK, SK])],
    27: [mode(5, mask, prefix=[SK, SK]) for mask in (zeros(SQ, SK), zeros(1, 1, SQ, SK))],
    28: [tnd(q_ends=(4, 5), kv_ends=(3, 7), sparse_mode=3, atten_mask=upper())],
    29: [tnd(sparse_mode=7, atten_mask=upper(), next_tockens=1, pre_tockens=9),
         tnd(sparse_mode=7, atten_mask=upper(), next_tockens=0, pre_tockens=3),
         tnd(sparse_mode=7, atten_mask=upper(), next_tockens=-2, pre_tockens=9),
         tnd(sparse_mode=8, atten_mask=upper(), next_tockens=1, pre_tockens=2),
         tnd(sparse_mode=8, atten_mask=upper(), next_tockens=-2, pre_tockens=9),
         tnd(q_ends=(4, 5), sparse_mode=7, atten_mask=upper(), next_tockens=0, pre_tockens=9),
         tnd(sparse_mode=0, atten_mask=zeros(3, 4), next_tockens=-1), tnd(sparse_mode=0, atten_mask=zeros(2, 2)),
         tnd(sparse_mode=4, atten_mask=upper(), pre_tockens=-1),
         tnd(sparse_mode=4, atten_mask=upper(), pre_tockens=1, next_tockens=-2)],
    30: [forward(pse=pse) for pse in (
        zeros(B, N, SQ, SK, dtype=torch.float16), zeros(N, SQ, SK, dtype=torch.float32),
        zeros(B, 1, SQ, SK, dtype=torch.float32), zeros(3, N, SQ, SK, dtype=torch.float32),
        zeros(B, N, 1024, SK, dtype=torch.float32))],
    31: [tnd(pse=torch.zeros(N * 7), sparse_mode=7, atten_mask=upper(), pre_tockens=9, next_tockens=0),
         tnd(q_ends=(2, 2, 5), kv_ends=(3, 3, 7), pse=torch.zeros(N * 7))],
    32: [forward(sink=sink) for sink in (torch.zeros(N, dtype=torch.float16), torch.zeros(N, 1), torch.zeros(N + 1))],
    33: [forward(padding_mask=zeros(B, SK))],
    34: [forward(inner_precise=3), forward(inner_precise=-1)],
    35: [lambda: OPS.fusion_attention_v3(*qkv(layout="TND"), N, "TND", actual_seq_qlen=[2, 5], actual_seq_kvlen=[3, 7]),
         lambda: OPS.fusion_attention(*qkv(layout="TND"), N, "TND", actual_seq_qlen=ENDS, actual_seq_kvlen=ENDS)],
    36: [forward(pse_type=1), forward(pre_tokens=3),
         lambda: OPS.fusion_attention_v2(*qkv(), N, "BNSD", pre_tockens=3)],
    37: [grad(extra=(None,)), grad(seed=3, keep_prob=0.5)],
    38: [grad(keep_prob=0.5), grad(keep_prob=0.5, seed=ENDS, offset=ENDS[:1]),
         grad(keep_prob=0.5, seed=torch.zeros(1), offset=ENDS[:1]), grad(keep_prob=0.5, seed=ENDS[:1])],
    39: [grad(dy=torch.zeros(B, N, SQ + 1, D)), grad(dy=torch.zeros(B, N, SQ, D).half()),
         grad(softmax_max=torch.ones(B, N, SQ)), grad(softmax_sum=torch.ones(B, N, SQ, 8).double()),
         grad(softmax_max=None), grad(softmax_sum=None), grad(attention_in=None),
         grad(attention_in=torch.zeros(B, N, SQ, D + 1))],
    40: [ring("BNSD"), ring("sbh"), ring("TND", input_softmax_layout="BNS8", actual_seq_qlen=torch.tensor([0, 4])),
         ring(prev=torch.zeros(4, 2, 2, 4), cur=torch.zeros(4, 2, 2, 4)), ring(cur=torch.zeros(4, 2, 16)),
         ring(cur=torch.zeros(4, 2, 8).half())],
    41: [ring(pm=torch.ones(2, 2, 4, 8).bfloat16()), ring(pm=torch.ones(2, 2, 4, 1)), ring("TND"),
         ring("TND", actual_seq_qlen=torch.tensor([0, 4], dtype=torch.int32)),
         ring("TND", **four(torch.ones(2, 2, 4, 8)), actual_seq_qlen=torch.tensor([0, 4])),
         ring(**four(torch.ones(4, 2, 8))), ring(**four(torch.ones(2, 3, 4, 8)))],
    42: [ring("TND", actual_seq_qlen=torch.tensor([1, 4])), ring("TND", actual_seq_qlen=torch.tensor([0, 3])),
         ring("TND", input_softmax_layout="SBH", actual_seq_qlen=torch.tensor([0, 5]))],
    43: [twice],
}  # fmt: skip
# The call on query, key and value in layout BNSD, and which pairs its result keeps; TND holds the first entry.
ACCEPTED = {
    7: [(lambda q, k, v: OPS.fusion_attention_v3(q, k, v, N, "bnsd")[0], ("full",)),
        (lambda *qkv: tnd_lower(*qkv), ("rectangles", ((0, 2, 0, 3), (2, 5, 3, 7))))],
    24: [(lambda q, k, v: OPS.fusion_attention_v3(q, k, v, N, "BNSD", sparse_mode=2)[0], ("full",))],
}  # fmt: skip


def tnd_lower(*qkv):
    """Lower case goes through the checks of TND too."""
    rows = [x[0].transpose(0, 1) for x in qkv]
    with pytest.raises(RuntimeError):
        OPS.fusion_attention_v3(*rows, N, "tnd")
    ends = {"actual_seq_qlen": ENDS, "actual_seq_kvlen": torch.tensor([3, 7])}
    return OPS.fusion_attention_v3(*rows, N, "tnd", **ends)[0].transpose(0, 1)[None]


def kept_pairs(rule):
    """bool [1, SQ, SK]: all, or the rectangles (first row, end, first column, end)."""
    keep = np.full((1, SQ, SK), rule[0] == "full")
    for row, row_end, column, column_end in rule[1] if len(rule) > 1 else ():
        keep[0, row:row_end, column:column_end] = True
    return keep


def test_every_row_of_the_table_is_here():
    assert REJECTED.keys() | ACCEPTED.keys() == set(range(1, 44))


@pytest.mark.parametrize(
    ("row", "place"), [(row, place) for row, calls in REJECTED.items() for place in range(len(calls))]
)
def test_rejected(row, place):
    with pytest.raises(RuntimeError) as caught:
        REJECTED[row][place]()
    # An error of ours or of the dispatcher's, not of something that broke on the way.
    assert "INTERNAL ASSERT" not in str(caught.value)
    assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("row", ACCEPTED)
def test_accepted(row):
    generator = torch.Generator().manual_seed(row)
    given = [torch.randn(x.shape, generator=generator) for x in qkv()]
    for call, rule in ACCEPTED[row]:
        out = call(*given)
        batch = out.shape[0]
        whole = [x[:batch].double().numpy() for x in given]
        expected = oracle.attend(*whole, kept_pairs(rule), scale=1.0).out
        torch.testing.assert_close(out.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("call", [
    lambda: OPS.fusion_attention_v2(*qkv(), N, "BNSD", query_rope=torch.zeros(1)),
    lambda: OPS.fusion_attention_v2(*qkv(), N, "BNSD", key_rope=torch.zeros(1)),
    lambda: OPS.fusion_attention_v2(*qkv(), N, "BNSD", pse_type=4, pse=torch.zeros(N)),
    lambda: OPS.fusion_attention_v2(*qkv(), N, "BNSD", pse_type=2, pse=torch.zeros(N)),
    lambda: OPS.fusion_attention_v2(*qkv(SQ=7), N, "BNSD", pse_type=2),
    lambda: OPS.fusion_attention_v2(*qkv(SQ=7), N, "BNSD", pse_type=2, pse=torch.zeros(N), q_start_idx=[1, 2]),
    lambda: OPS.fusion_attention_v2(*qkv(SQ=7), N, "BNSD", pse_type=3, pse=torch.zeros(N, requires_grad=True)),
    lambda: OPS.fusion_attention(*qkv(), N, "BNSD", dropout_mask=torch.zeros(16, dtype=torch.uint8)),
    forward(actual_seq_qlen=ENDS, actual_seq_kvlen=ENDS),
    forward(scale=float("nan")),
])  # fmt: skip
def test_also_rejected(call):
    """What the table leaves open and would be silently wrong."""
    with pytest.raises(RuntimeError):
        call()


def test_messages_name_the_argument_and_both_values():
    for call, parts in [
        (forward(heads=3), ("head_num is 3", "4 heads")),
        (forward(keep_prob=1.5), ("keep_prob is 1.5",)),
        (forward(atten_mask=zeros(SQ + 1, SK)), ("[6, 7]", "[5, 7]")),
        (tnd(q_ends=(2, 6)), ("6 tokens", "query 5")),
        (mode(6, prefix_mask(), prefix=[SK, SK + 1]), ("prefix[1] is 8", "2..7")),
    ]:
        with pytest.raises(RuntimeError) as caught:
            call()
        for part in parts:
            assert part in str(caught.value)

"""Shapes, dtypes and devices of the contract's ops without values, as traced code sees them; compiled calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from npu_cases import Call, upper
from test_npu_ops import tnd
from torch._subclasses.fake_tensor import FakeTensorMode

import ringspan  # noqa: F401  registers the ops

OPS = torch.ops.ringspan
LAYOUTS = ["BNSD", "BSND", "BSH", "SBH"]
CALLS = {
    **{layout: Call(layout=layout, arguments={"atten_mask": upper(), "sparse_mode": 3}) for layout in LAYOUTS},
    "half": Call(dtype="bfloat16"),
    "dropout": Call(arguments={"keep_prob": 0.5}),
    "pse and sink": Call(pse=torch.zeros(1, 4, 9, 13), sink=torch.zeros(4)),
    "TND": tnd([3, 0, 5], [4, 2, 5], 3, upper(), rows=2, columns=3),
    "empty": Call(q_len=0),
}  # fmt: skip


def describe(results) -> list:
    """What must be the same."""
    return [None if x is None else (tuple(x.shape), x.dtype, x.device.type, x.stride()) for x in results]


def both(call: Call):
    """Forward and gradient ops of a call."""
    leaves = [x.detach() for x in call.leaves()]

    def run(q, k, v, keywords):
        results = OPS.fusion_attention_v3(q, k, v, 4, call.layout, **keywords)
        renamed = {{"scale": "scale_value"}.get(name, name): value for name, value in keywords.items()}
        saved = {"softmax_max": results[1], "softmax_sum": results[2], "attention_in": results[0]}
        if "keep_prob" in renamed:
            saved |= {"seed": results[4], "offset": results[5]}
        gradients = OPS.fusion_attention_grad_v3(q, k, v, results[0], 4, call.layout, **saved, **renamed)
        return [*results, *gradients]

    return run, leaves, call.keywords()


@pytest.mark.parametrize("name", CALLS)
def test_fake_is_eager(name):
    run, leaves, keywords = both(CALLS[name])
    eager = describe(run(*leaves, keywords))
    mode = FakeTensorMode()
    fake = {key: mode.from_tensor(value) if torch.is_tensor(value) else value for key, value in keywords.items()}
    with mode:
        assert describe(run(*(mode.from_tensor(x) for x in leaves), fake)) == eager


@pytest.mark.parametrize("name", ["BNSD", "BSH", "TND", "pse and sink"])
def test_inner_ops_pass_opcheck(name):
    call = CALLS[name]
    q, k, v = (x.detach() for x in call.leaves())
    a = call.keywords()
    rest = (
        4, call.layout, a.get("pse"), None, a.get("atten_mask"), a["scale"], 1.0, 2**31 - 1, 2**31 - 1, 0, None,
        a.get("actual_seq_qlen"), a.get("actual_seq_kvlen"), a.get("sparse_mode", 0), "", a.get("sink"), 1, 0,
        None, None,
    )  # fmt: skip
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(OPS._contract_forward.default, (q, k, v, *rest), test_utils=utils)
    out, row_max, row_sum, *_ = OPS._contract_forward(q, k, v, *rest)
    arguments = (q, k, v, torch.ones_like(out), row_max, row_sum, out, False, *rest)
    torch.library.opcheck(OPS._contract_backward.default, arguments, test_utils=utils)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["BNSD", "TND", "pse and sink"])
def test_compiled_is_eager(name, backend):
    call = CALLS[name]
    keywords = call.keywords()

    def loss(q, k, v):
        out, row_max, row_sum, *_ = OPS.fusion_attention_v3(q * 1.5, k, v, 4, call.layout, **keywords)
        return out.square().sum() + row_max.detach().amax() * 0 + row_sum.detach().amin() * 0

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        leaves = call.leaves()
        value = run(*leaves)
        results.append([value, *torch.autograd.grad(value, leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


def test_draws_in_one_graph_differ_and_backward_repeats_them():
    eye = torch.eye(13).expand(2, 2, 13, 13)
    q, k, _ = Call(qk_dim=16).leaves()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def pair(q, k, v):
        return [OPS.fusion_attention_v3(q, k, v, 4, "BNSD", keep_prob=0.5)[0] for _ in range(2)]

    values = eye.clone().requires_grad_()
    first, second = pair(q, k, values)
    assert not torch.equal(first == 0, second == 0)
    # dV = out^T of ones when values are the identity: the columns' sums, of the very same pairs.
    (dv,) = torch.autograd.grad(first.sum(), values)
    columns = first.unflatten(1, (2, 2)).sum((2, 3))
    torch.testing.assert_close(dv[..., 0], columns, atol=1e-5, rtol=1e-5)


def test_ring_update_without_values():
    out, stats = torch.zeros(4, 2, 8, dtype=torch.bfloat16), torch.ones(2, 2, 4, 8)
    eager = OPS.ring_attention_update(out, stats, stats, out, stats, stats)
    mode = FakeTensorMode()
    with mode:
        fakes = [mode.from_tensor(x) for x in (out, stats, stats)]
        assert describe(OPS.ring_attention_update(*fakes, *fakes)) == describe(eager)


def test_sizes_that_do_not_fit_are_refused_without_values():
    for layout, heads in itertools.product(("BNSD",), (3, 0)):
        with FakeTensorMode(), pytest.raises(RuntimeError, match="head_num"):
            OPS.fusion_attention_v3(*(torch.empty(2, 4, 5, 8) for _ in range(3)), heads, layout)

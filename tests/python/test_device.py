"""The steps of accelerators, on stand-ins for their ops: exact forward and backward, or refused by name."""

from __future__ import annotations

import judge
import pytest
import standins
import torch
from cases import Case
from ringspan.device.npu import ring_merge
from ringspan.device.rows import Partial, merge

import ringspan as rs
from ringspan import device, names, support

BASE = Case(("causal",), seq_len=13, batch=2, qk_dim=8, v_dim=8, seed=50)
MASKS = {
    "full": ("full",),
    "causal": ("causal",),
    "window": ("window", 4, 0),
    "window on both sides": ("window", 3, 2),
    "chunked": ("chunked", 5),
    "prefix": ("prefix", (3, 9)),
    "documents": ("ids", (1, 1, 1, 2, 2, 0, 3, 3, 3, 3, 0, 4, 4)),
    "documents, full": ("ids", (1, 1, 1, 2, 2, 0, 1, 3, 3, 3, 0, 4, 4), ("full",)),
    "empty rows": ("bands", ((2, 5, 0, 9, None, 0), (7, 13, 3, 13, -2, 4))),
}
DTYPES = {"npu": ("float32", "bfloat16", "float16"), "cuda": ("float32", "bfloat16", "float16")}


def test_kernels_for_accelerators_are_in_force():
    for op in ("_step_forward", "_step_backward", "_step_refusal"):
        for key in ("CUDA", "PrivateUse1"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ringspan::{op}", key)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"ringspan::{op}", "CPU")


@pytest.mark.parametrize("kind", standins.KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(kind, mask):
    with standins.accelerator(kind) as calls:
        dtypes = DTYPES[kind.split()[0]]
        judge.check(None, 1, [BASE.but(mask=MASKS[mask], dtype=dtype) for dtype in dtypes])
    assert sum(count for name, count in calls.items() if "backward" not in name and name != "update") > 0
    assert sum(count for name, count in calls.items() if "backward" in name) > 0
    assert (calls["update"] > 0) == (kind == "npu")


@pytest.mark.parametrize("kind", standins.KINDS)
@pytest.mark.parametrize("split", ["head_tail", "striped", "shuffled", "padded"])
def test_maps_of_one_rank(kind, split):
    """Rows in another order than positions, padding rows, unequal strides between rows and columns."""
    positions = {
        "shuffled": (12, 3, *range(3), *range(4, 12)),
        "padded": (0, 2, 4, -1, 6, 8, 10, 12, 1, 3, 5, 7, 9, 11),
    }
    rule = ("positions", (positions[split],)) if split in positions else (split,)
    other = ("positions", ((*range(0, 13, 3), *range(1, 13, 3), *range(2, 13, 3)),))
    cases = [
        BASE.but(split=rule, kv_split=kv, mask=mask, batch=1)
        for kv in (None, other)
        for mask in (("causal",), ("window", 4, 0), ("full",))
    ]
    with standins.accelerator(kind):
        judge.check(None, 1, cases)


@pytest.mark.parametrize("kind", standins.KINDS)
@pytest.mark.parametrize("layout", names.LAYOUTS)
def test_layouts(kind, layout):
    case = BASE.but(layout=layout, batch=1 if layout == "TND" else 2)
    with standins.accelerator(kind):
        judge.check(None, 1, [case, case.but(kv_heads=4), case.but(kv_heads=1, dtype="bfloat16")])


@pytest.mark.parametrize("kind", standins.KINDS)
def test_sink_and_scale(kind):
    sink = (0.5, -1.0, 3.0, float("-inf"))
    cases = [BASE.but(sink=sink, mask=MASKS[name], scale=0.7) for name in ("causal", "empty rows")]
    cases += [cases[0].but(split=("positions", ((0, -1, *range(1, 13), -1),)), batch=1)]
    with standins.accelerator(kind):
        judge.check(None, 1, cases)


def test_head_dims():
    with standins.accelerator("cuda") as calls:
        judge.check(None, 1, [BASE.but(qk_dim=8, v_dim=16, dtype="bfloat16"), BASE.but(qk_dim=264, v_dim=264)])
        assert calls["flash"] == 0
    with standins.accelerator("npu"):
        judge.check(None, 1, [BASE.but(qk_dim=8, v_dim=5), BASE.but(qk_dim=3, v_dim=1)])


def test_flash_serves_what_it_can():
    with standins.accelerator("cuda") as calls:
        judge.check(None, 1, [BASE.but(dtype="bfloat16"), BASE.but(dtype="float16", mask=("full",))])
    assert calls["flash"] > 0
    assert calls["flash backward"] > 0
    assert calls["efficient"] == 0


SAMPLES = {
    "mask": BASE.but(mask=("window", 5, 2)),
    "shard_map": BASE.but(split=("striped",)),
    "kv_shard_map": BASE.but(kv_split=("contiguous",), kv_len=9, mask=("causal", "bottom_right")),
    "attn_mask (bool)": BASE.but(attn_mask="NSK"),
    "attn_mask (float)": BASE.but(bias="BSK"),
    "bias (tensor)": BASE.but(bias="BNSK", attn_mask="SK"),
    "bias (alibi)": BASE.but(alibi=(0.25, 0.5, 0.125, 1.0)),
    "sink": BASE.but(sink=(0.5, -1.0, 3.0, 0.25)),
    "softcap": BASE.but(softcap=1.5),
    "dropout_p": BASE.but(dropout=(0.4, 77, 5)),
    "return_stats": BASE.but(lse_grad=True),
}


@pytest.mark.parametrize("kind", ["npu", "cuda"])
@pytest.mark.parametrize("feature", [*support.FEATURES, *names.DTYPES])
def test_the_table_of_devices(kind, feature):
    case = SAMPLES[feature] if feature in SAMPLES else BASE.but(dtype=feature)
    cell = support.device_cell(feature, kind)
    with standins.accelerator(kind):
        if cell == support.EXACT:
            judge.check(None, 1, [case])
            return
        with pytest.raises(NotImplementedError, match="is not offered on"):
            judge.check(None, 1, [case])


def test_sizes_out_of_limits_are_refused():
    q = torch.zeros(1, 2, 4, 12)
    assert "multiple of 8" in device.cuda_refusal(q, [1, 2, 2, 12, 12], [])
    assert "at most 256" in device.npu_refusal(q, [1, 300, 300, 12, 12], [])
    assert "must not be larger" in device.npu_refusal(q, [1, 2, 2, 12, 16], [])
    assert device.npu_refusal(q, [1, 2, 2, 12, 12], ["sink"]) == ""
    assert device.cuda_refusal(q, [1, 2, 2, 16, 8], ["sink"]) == ""


@pytest.mark.parametrize("kind", standins.KINDS)
def test_what_steps_refuse_on_the_cpu_runs_on_our_kernels(kind):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    right = rs.attention(q, k, v, mask=rs.causal())
    with standins.accelerator(kind, loud=False) as calls:
        found = rs.attention(q, k, v, mask=rs.causal())
        assert torch.equal(found, right)
        assert torch.equal(torch.autograd.grad(found.sum(), q)[0], torch.autograd.grad(right.sum(), q)[0])
    assert not calls


def test_an_error_in_a_step_reaches_the_caller_and_leaves_nothing():
    q = torch.randn(1, 2, 9, 8)
    with standins.accelerator("npu"):
        fault = RuntimeError("the device is full")

        def fail(*_args, **_more):
            raise fault

        torch.ops.npu.npu_fusion_attention_v3, kept = fail, torch.ops.npu.npu_fusion_attention_v3
        try:
            with pytest.raises(RuntimeError, match="the device is full"):
                rs.attention(q, q, q)
        finally:
            torch.ops.npu.npu_fusion_attention_v3 = kept
        torch.testing.assert_close(rs.attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))


def test_the_ring_update_merges_as_the_state_does():
    source = torch.Generator().manual_seed(1)
    one, other = (
        Partial(
            torch.randn(2, 3, 5, 4, generator=source),
            torch.randn(2, 3, 5, generator=source) * 9,
            torch.rand(2, 3, 5, generator=source) + 1,
        )
        for _ in range(2)
    )
    one.max[0, 1, 2], one.sum[0, 1, 2], one.out[0, 1, 2] = -torch.inf, 0.0, 0.0
    with standins.accelerator("npu") as calls:
        found = ring_merge(one, other)
    assert calls["update"] == 1
    for own, right in zip(found, merge(one, other), strict=True):
        torch.testing.assert_close(own, right, rtol=2e-6, atol=2e-6)


def test_compiled_calls_run_the_steps_too():
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        return rs.attention(q.sin(), k, v, mask=rs.causal()).cos()

    with standins.accelerator("npu") as calls:
        out = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
        gradient = torch.autograd.grad(out.sum(), q)[0]
        assert calls["forward"] == calls["backward"] == 1
    right = run(q, k, v)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(gradient, torch.autograd.grad(right.sum(), q)[0])

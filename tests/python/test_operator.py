"""The dispatcher ops in one process: autograd, tracing, autocast, strides, extremes."""

from functools import partial

import numpy as np
import oracle
import pytest
import torch
from cases import mask_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringspan as rs

ATTENTION = torch.ops.ringspan.attention.default


def inputs(q_rows=6, kv_rows=6, heads=(4, 2), dims=(8, 8), dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads[0], q_rows, dims[0]), (heads[1], kv_rows, dims[0]), (heads[1], kv_rows, dims[1]))
    return [torch.randn(2, *shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


class CountForwards(TorchDispatchMode):
    """Counts the forwards that are run."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func == torch.ops.ringspan.attention_forward.default
        return func(*args, **(kwargs or {}))


def test_gradcheck_of_the_sink():
    sink = torch.tensor([2.0, -1.0, 0.3, float("-inf")], dtype=torch.float64, requires_grad=True)

    def call(q, k, v, finite):
        whole = torch.cat([finite, sink.detach()[3:]])
        out, stats = rs.attention(q, k, v, mask=rs.documents(ids=[1, 1, 0, 2, 2, 1]), sink=whole, return_stats=True)
        return out, torch.where(stats.lse > -1e300, stats.lse, 0)

    assert torch.autograd.gradcheck(call, [*inputs(), sink.detach()[:3].requires_grad_()])


def test_a_sink_under_autocast_and_compile():
    q, k, v = inputs(dtype=torch.float32)
    sink = torch.tensor([1.0, 0.0, -3.0, 5.0], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, stats = rs.attention(q, k, v, sink=sink, return_stats=True)
    assert out.dtype == torch.bfloat16
    assert stats.lse.dtype == torch.float32
    (gradient,) = torch.autograd.grad(out.float().sum(), sink)
    assert gradient.dtype == torch.float32

    def loss(q, k, v, sink):
        return rs.attention(q, k, v, mask=rs.causal(), sink=sink).square().sum()

    eager = torch.autograd.grad(loss(q, k, v, sink), (q, sink))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for got, expected in zip(torch.autograd.grad(compiled(q, k, v, sink), (q, sink)), eager, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "mask",
    [
        rs.full(),
        rs.causal(),
        rs.window(2, 1),
        rs.documents(ids=[1, 1, 0, 2, 2, 1]),
        rs.bands([(0, 3, 0, 2, None, None)]),
    ],
)
def test_gradcheck(mask):
    def call(q, k, v):
        out, stats = rs.attention(q, k, v, mask=mask, return_stats=True)
        return out, torch.where(stats.lse > -1e300, stats.lse, 0)

    assert torch.autograd.gradcheck(call, inputs(dims=(3, 2)))


def test_opcheck():
    tables = [torch.tensor([[3, 3]])]
    for spec in ([1, 1, 2, 6, 6, 0, 0, 0, 0, 1, 1], [1, 1, 2, 6, 6, 0, 0, 0, 0, 5, 0, 1, 0, 0, 0]):
        for grad, sink in ((False, None), (True, None), (False, torch.randn(4)), (True, torch.randn(4))):
            arguments = (
                *inputs(grad=grad, dtype=torch.float32),
                spec,
                tables,
                0.3,
                "BNSD",
                4,
                "",
            )
            given = {"sink": None if sink is None else sink.requires_grad_(grad)}
            torch.library.opcheck(ATTENTION, arguments, given)


def test_max_and_sum_carry_no_gradient():
    q, k, v = inputs()
    _, stats = rs.attention(q, k, v, return_stats=True)
    assert (stats.max.requires_grad, stats.sum.requires_grad, stats.lse.requires_grad) == (False, False, True)
    assert torch.allclose(stats.max + stats.sum.log(), stats.lse)


def test_only_asked_gradients():
    q, k, v = inputs(grad=False)
    for wanted in range(3):
        leaves = [x.clone().requires_grad_(place == wanted) for place, x in enumerate((q, k, v))]
        rs.attention(*leaves, mask=rs.causal()).sum().backward()
        assert [x.grad is not None for x in leaves] == [place == wanted for place in range(3)]


def test_lse_alone_and_out_alone():
    keep = oracle.keep_of(("causal",), 6, 6)
    leaves = inputs()
    q, k, v = (x.detach().numpy() for x in leaves)
    out, stats = rs.attention(*leaves, mask=rs.causal(), return_stats=True)
    dlse = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad(stats.lse, leaves, dlse, retain_graph=True, materialize_grads=True)
    right = oracle.attend(q, k, v, keep, np.zeros(out.shape), dlse.numpy())
    for grad, name in zip(got, ("dq", "dk", "dv"), strict=True):
        assert np.abs(grad.numpy() - getattr(right, name)).max() < 1e-12
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    right = oracle.attend(q, k, v, keep, np.ones(out.shape))
    assert np.abs(got[0].numpy() - right.dq).max() < 1e-12


def test_double_backward_raises():
    leaves = inputs()
    with pytest.raises(RuntimeError, match=r"double|twice|second|create_graph"):
        torch.autograd.grad(rs.attention(*leaves).sum(), leaves, create_graph=True)


def test_forward_mode_and_vmap_raise():
    q, k, v = inputs(grad=False)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda x: rs.attention(x, k, v), (q,), (torch.ones_like(q),))
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.vmap(lambda x: rs.attention(x, k, v))(torch.stack([q, q]))


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_autocast_takes_its_dtype(amp):
    q, k, v = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=amp):
        out = rs.attention(q, k.to(amp), v, mask=rs.causal())
    assert out.dtype == amp
    right = rs.attention(*(x.to(amp) for x in (q, k, v)), mask=rs.causal())
    assert torch.equal(out, right)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=amp):
        assert rs.attention(q.double(), k.double(), v.double()).dtype == torch.float64
        with pytest.raises(ValueError, match="float64"):
            rs.attention(q, k.double(), v)


@pytest.mark.parametrize("saved", [True, False])
def test_a_checkpoint_policy_saves_attention_by_its_name(saved):
    """docs/training.md names the op; one that is saved is not computed a second time."""
    q, k, v = inputs()
    wanted = torch.autograd.grad(rs.attention(q, k, v, mask=rs.causal()).sin().sum(), (q, k, v))

    def policy(_context, op, *_arguments, **_options):
        is_attention = op == torch.ops.ringspan.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if saved and is_attention else CheckpointPolicy.MUST_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    with CountForwards() as count:
        out = checkpoint(
            lambda *x: rs.attention(*x, mask=rs.causal()).sin(), q, k, v, use_reentrant=False, context_fn=contexts
        )
        got = torch.autograd.grad(out.sum(), (q, k, v))
    assert count.number == (1 if saved else 2)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    leaves = inputs()
    plain = torch.autograd.grad(rs.attention(*leaves, mask=rs.causal()).sin().sum(), leaves)
    out = checkpoint(lambda *x: rs.attention(*x, mask=rs.causal()).sin(), *leaves, use_reentrant=reentrant)
    out.sum().backward()
    assert all(torch.equal(leaf.grad, right) for leaf, right in zip(leaves, plain, strict=True))


def test_meta_and_fake_tensors_give_shapes():
    for dtype, stats_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        q, k, v = (x.to("meta", dtype) for x in inputs(5, 5, dims=(8, 3), grad=False))
        out, stats = rs.attention(q, k, v, return_stats=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 4, 5, 3), dtype, "meta")
        assert {(tuple(x.shape), x.dtype) for x in stats} == {((2, 4, 5), stats_dtype)}


def test_changing_an_input_before_backward_is_noticed():
    q, k, v = inputs()
    held = k * 1
    out = rs.attention(q, held, v)
    held.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


VIEWS = {
    "slices of a packed tensor": lambda x: torch.stack([x, x + 1, x], -3).select(-3, 0),
    "permuted": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "every second row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "every second column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "a corner of a larger one": lambda x: torch.nn.functional.pad(x, (3, 2, 1, 4))[:, :, 1:-4, 3:-2],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS)
def test_a17_views_give_equal_bits(view, dtype):
    plain = [x.detach() for x in inputs(33, 33, dims=(16, 16), dtype=dtype)]
    dout = torch.randn(2, 4, 33, 16, generator=torch.Generator().manual_seed(9)).to(dtype)
    results = []
    for make in (lambda x: x, VIEWS[view]):
        leaves = [make(x).detach() for x in plain]
        before = [x.clone() for x in leaves]
        leaves = [x.requires_grad_() for x in leaves]
        out = rs.attention(*leaves, mask=rs.causal())
        results.append([out, *torch.autograd.grad(out, leaves, make(dout))])
        assert all(torch.equal(x, kept) for x, kept in zip(leaves, before, strict=True))
    assert VIEWS[view](plain[0]).is_contiguous() is False
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_a17_strides_of_zero():
    q, k, v = (x.detach().requires_grad_() for x in inputs(heads=(4, 1), dtype=torch.float32))
    wide = [x.expand(2, 4, 6, 8) for x in (k, v)]
    assert wide[0].stride(1) == 0
    outs = [rs.attention(q, *pair) for pair in (wide, [x.contiguous() for x in wide])]
    assert torch.equal(*outs)
    ones = torch.autograd.grad(outs[0].sum(), (q, k, v))
    same = torch.autograd.grad(outs[1], (q, k, v), torch.ones_like(outs[1]))
    assert all(torch.equal(x, y) and bool(torch.isfinite(x).all()) for x, y in zip(ones, same, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("height", [1e4, -1e4])
def test_large_scores_stay_finite(dtype, height):
    """Scores up to 1e4: the softmax is a choice of the largest, and gradients are finite."""
    generator = torch.Generator().manual_seed(2)
    q = torch.full((1, 2, 40, 1), 100.0, dtype=dtype, requires_grad=True)
    k = (height / 100 * torch.rand(1, 2, 40, 1, generator=generator)).to(dtype).requires_grad_()
    v = torch.randn(1, 2, 40, 4, generator=generator).to(dtype).requires_grad_()
    for mask in (("full",), ("causal",), ("ids", (0,) * 8 + (1,) * 32)):
        out, stats = rs.attention(q, k, v, mask=mask_of(mask), scale=1.0, return_stats=True)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(bool(torch.isfinite(x).all()) for x in (out, *grads))
        assert not any(bool(x.isnan().any()) for x in stats)
        right = oracle.attend(
            *(x.detach().double().numpy() for x in (q, k, v)), oracle.keep_of(mask, 40, 40), scale=1.0
        )
        limit = {torch.float64: 1e-9, torch.float32: 2e-3}.get(dtype, 2e-2)
        assert oracle.error(out.detach().double().numpy(), right.out) < limit


def test_masked_inf_and_nan_do_not_leak():
    q, k, v = (x.detach() for x in inputs(8, 8, dtype=torch.float32))
    mask = rs.documents(ids=[1, 1, 1, 0, 2, 2, 0, 0])
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    dirty = [x.clone() for x in (q, k, v)]
    for x in dirty:
        x[:, :, 3], x[:, :, 6], x[:, :, 7] = float("nan"), float("inf"), -float("inf")
    dirty = [x.requires_grad_() for x in dirty]
    results = []
    for leaves in (clean, dirty):
        out = rs.attention(*leaves, mask=mask)
        dout = torch.ones_like(out)
        dout[:, :, 3] = float("nan") if leaves is dirty else 1.0
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_empty_inputs():
    for q_rows, kv_rows in ((0, 5), (5, 0), (0, 0)):
        leaves = inputs(q_rows, kv_rows, dtype=torch.float32)
        out, stats = rs.attention(*leaves, return_stats=True)
        assert out.shape == (2, 4, q_rows, 8)
        assert (out == 0).all()
        assert (stats.lse == -torch.inf).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("rows", [2, 400])  # few rows and many take different kernels
def test_one_thread_and_two_give_equal_bits(rows):
    """One head and several blocks of rows and of keys, so that threads share what must be added up."""
    torch.manual_seed(2)
    leaves = [torch.randn(1, 1, length, 64, requires_grad=True) for length in (rows, 1100, 1100)]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = rs.attention(*leaves, mask=rs.causal("bottom_right"))
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.set_num_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_biases_and_dropout_under_autocast():
    """What enters the softmax keeps its dtype; the products take autocast's."""
    q, k, v = (torch.randn(1, 2, 12, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 12, 12, requires_grad=True)
    options = {"mask": rs.causal(), "bias": bias, "softcap": 3.0, "dropout_p": 0.25, "seed": 4}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rs.attention(q, k, v, **options)
    assert out.dtype == torch.bfloat16
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    assert torch.equal(out, rs.attention(*half, **options))
    gradients = torch.autograd.grad(out.float().sum(), (q, bias))
    assert [x.dtype for x in gradients] == [torch.float32, torch.float32]


@pytest.mark.parametrize("dynamic", [False, True])
def test_biases_compile_whole_and_new_lengths_do_not_recompile_for_ever(dynamic):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def attend(q, bias, keep):
        return rs.attention(q, q, q, mask=rs.causal(), bias=bias, attn_mask=keep, softcap=5.0, dropout_p=0.1, seed=3)

    for seq_len in (9, 14, 17):
        q = torch.randn(1, 2, seq_len, 8, requires_grad=True)
        bias, keep = torch.randn(seq_len, seq_len, requires_grad=True), torch.rand(seq_len, seq_len) > 0.2
        eager = rs.attention(q, q, q, mask=rs.causal(), bias=bias, attn_mask=keep, softcap=5.0, dropout_p=0.1, seed=3)
        compiled = attend(q, bias, keep)
        torch.testing.assert_close(compiled, eager)
        dout = torch.randn_like(eager)
        for one, other in zip(
            torch.autograd.grad(compiled, (q, bias), dout), torch.autograd.grad(eager, (q, bias), dout), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_gradcheck_with_everything_that_changes_pairs():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    row = torch.randn(2, 1, 5, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, bias, row):
        return rs.attention(q, k, v, attn_mask=bias, bias=row, softcap=1.5, dropout_p=0.3, seed=2)

    assert torch.autograd.gradcheck(call, (q, k, v, bias, row))


def test_a_mask_tensor_beside_a_mask():
    """Both must keep a pair; rows that keep nothing are empty."""
    q, k, v = (torch.randn(2, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    keep = torch.rand(2, 1, 9, 9) > 0.4
    keep[0, 0, 3] = False
    out, stats = rs.attention(q, k, v, mask=rs.window(4), attn_mask=keep, return_stats=True)
    both = keep & (torch.ones(9, 9).tril() * torch.ones(9, 9).triu(-4)).bool()
    scores = (q @ k.mT / 2).masked_fill(~both, -torch.inf)
    right = torch.where(both.any(-1, keepdim=True), scores.softmax(-1), 0.0) @ v
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(stats.lse, scores.logsumexp(-1))
    assert (out[0, :, 3] == 0).all()

"""The stand-in for torch_npu in one process: names, results, random numbers, graphs, and leaving no trace."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from npu_cases import Call, kept, upper
from ringspan.compat import torch_npu as compat
from torch.utils.checkpoint import checkpoint

import ringspan as rs


@pytest.fixture
def torch_npu():
    assert compat.install()
    yield importlib.import_module("torch_npu")
    compat.uninstall()


def error(found, right):
    return oracle.error(found.detach().double().numpy(), right)


def test_the_documented_names(torch_npu):
    for name in ("fusion_attention", "fusion_attention_v2", "fusion_attention_v3", "ring_attention_update"):
        assert getattr(torch_npu, f"npu_{name}") is getattr(torch.ops.npu, f"npu_{name}")
    from torch_npu.distributed.tensor.experimental import context_parallel
    from torch_npu.distributed.tensor.experimental._context_parallel import (
        _context_parallel_shard,
        _HeadTailLoadBalancer,
        set_rotate_method,
    )
    from torch_npu.distributed.tensor.experimental._context_parallel._attention import (
        npu_disable_cp_dtensor_dispatcher,
        npu_enable_cp_dtensor_dispatcher,
    )
    from torch_npu.testing.common_distributed import skipIfUnsupportMultiNPU, with_comms
    from torch_npu.testing.common_utils import SupportedDevices
    from torch_npu.testing.testcase import TestCase, run_tests

    assert all(
        callable(one)
        for one in (
            context_parallel, _context_parallel_shard, _HeadTailLoadBalancer, set_rotate_method, SupportedDevices,
            npu_disable_cp_dtensor_dispatcher, npu_enable_cp_dtensor_dispatcher, skipIfUnsupportMultiNPU, with_comms,
            TestCase, run_tests,
        )
    )  # fmt: skip


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_versions_are_exact(torch_npu, version):
    call = Call(keep=kept(3, 9, 13)[None], v_dim=8, arguments={"atten_mask": upper(), "sparse_mode": 3})
    leaves, expected = call.leaves(), call.expect()
    results = getattr(torch_npu, f"npu_fusion_attention{version}")(*leaves, 4, "BNSD", **call.keywords())
    dout = torch.from_numpy(call.inputs()[3]).float()
    assert error(results[0], expected.out) <= 1e-5
    for found, right in zip(torch.autograd.grad(results[0], leaves, dout), (expected.dq, expected.dk, expected.dv),
                            strict=True):  # fmt: skip
        assert error(found, right) <= 5e-5
    numbers = {} if version == "_v3" else {"seed": results[4], "offset": results[5], "numels": results[6]}
    direct = getattr(torch_npu, f"npu_fusion_attention_grad{version}")(
        *(x.detach() for x in leaves), dout, 4, "BNSD", softmax_max=results[1], softmax_sum=results[2],
        attention_in=results[0].detach(), scale_value=call.scale, **call.arguments, **numbers,
    )  # fmt: skip
    assert error(direct[0], expected.dq) <= 5e-5


def test_packed_documents_in_version_1(torch_npu):
    q = torch.randn(5, 2, 8)
    out = torch_npu.npu_fusion_attention(q, q, q, 2, "TND", actual_seq_qlen=[2, 5], actual_seq_kvlen=[2, 5])[0]
    third = torch_npu.npu_fusion_attention_v3(
        q, q, q, 2, "TND", actual_seq_qlen=torch.tensor([2, 5]), actual_seq_kvlen=torch.tensor([2, 5])
    )[0]
    assert torch.equal(out, third)


def test_errors_are_the_contracts(torch_npu):
    q = torch.randn(1, 2, 4, 8)
    for call in (
        lambda: torch_npu.npu_fusion_attention(q, q, q, 0, "BNSD"),
        lambda: torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.0),
        lambda: torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", dropout_mask=torch.zeros(16, dtype=torch.uint8)),
        lambda: torch_npu.npu_fusion_attention_v3(q, q, q, 2, "BNSD", seed=1),
        lambda: torch_npu.npu_fusion_attention_v3(q, q, q, 2, "BNSD", pre_tokens=1),
    ):
        with pytest.raises(RuntimeError):
            call()


def kept_bits(torch_npu, seed, offset, count):
    mask = torch_npu._npu_dropout_gen_mask(torch.empty(0), [count], 0.4, seed, offset, parallel=True, sync=False)
    return np.unpackbits(mask.numpy(), bitorder="little")[:count].astype(bool)


def test_dropout_draws_from_the_devices_generator(torch_npu):
    """Ones as values show which pairs are kept; each call moves the offset on by 12."""
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 8, 8)
    v = torch.eye(8).expand(1, 2, 8, 8)
    torch.npu.manual_seed(2)
    for offset in (0, 12, 24):
        out, _, _, _, seed, used = torch_npu.npu_fusion_attention_v3(q, k, v, 2, "BNSD", keep_prob=0.6)
        assert (int(seed), int(used)) == (2, offset)
        np.testing.assert_array_equal(out.numpy().ravel() > 0, kept_bits(torch_npu, 2, offset, 48))
    torch.npu.manual_seed(0)
    *_, seed, used, numels = torch_npu.npu_fusion_attention(q, k, v, 2, "BNSD", keep_prob=0.6)
    assert (seed, used, numels) == (0, 0, 48)
    *_, seed, used, _ = torch_npu.npu_fusion_attention(q, k, v, 2, "BNSD", keep_prob=0.6, seed=9, offset=4)
    assert (seed, used) == (9, 4)
    *_, seed, used, numels = torch_npu.npu_fusion_attention_v2(q, k, v, 2, "BNSD", keep_prob=0.6)
    assert (seed, used, numels) == (0, 12, 48)


def test_states_of_random_numbers(torch_npu):
    q = torch.randn(1, 2, 9, 8)

    def drop():
        return torch_npu.npu_fusion_attention_v3(q, q, q, 2, "BNSD", keep_prob=0.6)[0]

    torch.manual_seed(5)
    first, second = drop(), drop()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(drop(), first)
    state = torch.npu.get_rng_state()
    assert torch.equal(drop(), second)
    torch.npu.set_rng_state(state)
    assert torch.equal(drop(), second)
    whole = torch.get_rng_state()
    third = drop()
    torch.set_rng_state(whole)
    assert torch.equal(drop(), third)
    with pytest.raises(ValueError, match="uint8"):
        torch.npu.set_rng_state(torch.zeros(3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_pairs(torch_npu, reentrant):
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))

    def block(q, k, v):
        return torch_npu.npu_fusion_attention_v3(q, k, v, 2, "BNSD", keep_prob=0.6)[0].sin()

    torch.npu.manual_seed(3)
    right = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    torch.npu.manual_seed(3)
    out = checkpoint(block, q, k, v, use_reentrant=reentrant)
    torch_npu.npu_fusion_attention_v3(q, k, v, 2, "BNSD", keep_prob=0.6)
    out.sum().backward()
    assert all(torch.equal(leaf.grad, one) for leaf, one in zip((q, k, v), right, strict=True))


def test_device_strings(torch_npu):
    assert torch.zeros(2, device="npu").device.type == "cpu"
    x = torch.randn(3, device="npu:0").to("npu:1").npu()
    assert x.device.type == "cpu"
    assert torch.nn.Linear(2, 2).to("npu").npu().weight.device.type == "cpu"
    assert torch.npu.is_available()
    assert torch.npu.get_device_name() == "Ascend910B2"
    torch.npu.set_device("npu:1")
    assert torch.npu.current_device() == 1
    with pytest.raises(RuntimeError, match="npu device 7"):
        torch.npu.set_device(7)


def test_graphs_replay_on_new_values(torch_npu):
    q = torch.randn(1, 2, 9, 8)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        view = q.transpose(0, 1)
        out = torch_npu.npu_fusion_attention_v3(q.sin(), q, q, 2, "BNSD", keep_prob=0.6)[0].mul_(2)
    q.copy_(torch.randn_like(q))
    torch.npu.manual_seed(8)
    graph.replay()
    found = out.clone()
    torch.npu.manual_seed(8)
    right = torch_npu.npu_fusion_attention_v3(q.sin(), q, q, 2, "BNSD", keep_prob=0.6)[0].mul_(2)
    assert torch.equal(found, right)
    graph.replay()
    assert not torch.equal(out, found)
    assert torch.equal(view, q.transpose(0, 1))
    with pytest.raises(RuntimeError, match="not being captured"):
        graph.capture_end()


def test_compiled(torch_npu):
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        return torch.ops.npu.npu_fusion_attention_v3(q, k, v, 2, "BNSD", scale=0.3, keep_prob=1.0)[0].sin()

    out = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
    assert torch.equal(out, run(q, k, v))
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.autograd.grad(run(q, k, v).sum(), q)[0])


def test_helpers_for_tests(torch_npu):
    from torch_npu.testing.common_utils import SupportedDevices
    from torch_npu.testing.testcase import TestCase

    case = TestCase()
    case.assertRtolEqual(torch.ones(3), torch.ones(3) + 5e-5)
    case.assertRtolEqual(np.ones(3), np.ones(3))
    case.assertEqual(torch.ones(2), torch.ones(2))  # noqa: PT009  the helper is what is tested
    with pytest.raises(AssertionError):
        case.assertRtolEqual(torch.ones(3), torch.ones(3) + 5e-3)
    ran = []
    SupportedDevices(["Ascend910B"])(ran.append)(1)
    assert ran == [1]
    with pytest.raises(Exception, match="for "):
        SupportedDevices(["Ascend310P"])(ran.append)(1)


def test_the_dispatcher_is_looked_up_when_called(torch_npu, monkeypatch):
    from torch.distributed.tensor.experimental._context_parallel import _attention

    seen = []
    monkeypatch.setattr(rs, "enable_cp_dtensor_dispatcher", lambda: seen.append("on"), raising=False)
    monkeypatch.setattr(rs, "disable_cp_dtensor_dispatcher", lambda: seen.append("off"), raising=False)
    _attention._enable_cp_dtensor_dispatcher()
    _attention._disable_cp_dtensor_dispatcher()
    assert seen == ["on", "off"]


def snapshot():
    from torch.distributed.tensor.experimental._context_parallel import _attention

    owners = (torch, torch.random, torch.Tensor, torch.nn.Module, torch.ops.npu, _attention, dist.Backend)
    tables = (
        dist.Backend.backend_capability,
        dist.Backend.backend_type_map,
        dist.Backend._plugins,
        dist.Backend.default_device_backend_map,
    )
    modules = {name for name in sys.modules if name.split(".")[0] == "torch_npu" or name == "torch.npu"}
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key("ringspan::_step_forward", "CPU")
    names = [dict(vars(one)) for one in owners]
    modes = torch.overrides._get_current_function_mode_stack()
    return names, [dict(one) for one in tables], list(dist.Backend.backend_list), modules, kernels, modes


def test_uninstall_leaves_everything_as_it_was():
    _ = vars(torch.ops.npu)
    before = snapshot()
    assert compat.install()
    assert compat.install()
    assert compat.is_installed()
    q = torch.randn(1, 2, 4, 8)
    import torch_npu

    torch_npu.npu_fusion_attention_v3(q, q, q, 2, "BNSD")
    assert snapshot() != before
    compat.uninstall()
    compat.uninstall()
    assert not compat.is_installed()
    after = snapshot()
    for one, other in zip(before, after, strict=True):
        assert one == other
    with pytest.raises(ImportError):
        importlib.import_module("torch_npu")
    assert not hasattr(torch.ops.npu, "npu_fusion_attention_v3")


def test_the_real_one_is_left_alone(monkeypatch):
    real = type(sys)("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", real)
    assert not compat.install()
    assert sys.modules["torch_npu"] is real
    assert not compat.is_installed()


def test_modes_may_be_entered_after_the_installation():
    from torch.overrides import TorchFunctionMode

    class Other(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert compat.install()
    with Other():
        compat.uninstall()
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
    assert not torch.overrides._get_current_function_mode_stack()

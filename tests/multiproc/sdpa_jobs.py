"""Jobs of the pool: F.scaled_dot_product_attention inside PyTorch's own context parallelism, on CPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dtensor_jobs import mesh_for, order_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as pytorch
from torch.distributed.tensor.experimental._context_parallel import _sharding_rules as rules
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

import ringspan as rs


@dataclass(frozen=True)
class Setting:
    """One training step of attention under PyTorch's context parallelism."""

    is_causal: bool = True
    load_balance: bool = True
    rotate: str = "alltoall"
    compiled: bool = False
    forward_only: bool = False
    use_context: bool = True
    dtype: str = "float32"
    heads: int = 4
    kv_heads: int = 4
    scale: float | None = None
    mask: str | None = None  # bool or float, [B, 1, S, S]
    math: bool = False


class Attention(nn.Module):
    """A module that does nothing but call SDPA, compiled or not; PyTorch's hooks come around it."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self._sdpa = F.scaled_dot_product_attention
        if compiled:
            torch._dynamo.reset()
            self._sdpa = torch.compile(self._sdpa, fullgraph=True, backend="aot_eager")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        """See F.scaled_dot_product_attention."""
        return self._sdpa(q, k, v, **keywords)


def inputs_of(setting: Setting, world: int) -> tuple[list[Tensor], Tensor | None]:
    """The same on every rank."""
    source = torch.Generator().manual_seed(10)
    length, dtype = 16 * world, getattr(torch, setting.dtype)
    tensors = [
        torch.rand(2, heads, length, 8, generator=source).to(dtype)
        for heads in (setting.heads, setting.kv_heads, setting.kv_heads)
    ]
    mask = None
    if setting.mask is not None:
        mask = torch.rand(2, 1, length, length, generator=source) < 0.7
        mask[..., 0] = True
        if setting.mask == "float":
            mask = torch.where(mask, torch.rand(mask.shape, generator=source), -torch.inf)
    return tensors, mask


def reference(setting: Setting, tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Dense, in float64: out and, for a loss of sum(out), the gradients."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    groups = setting.heads // setting.kv_heads
    kk, vv = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ kk.transpose(2, 3) * (q.shape[-1] ** -0.5 if setting.scale is None else setting.scale)
    if setting.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    out = scores.softmax(-1) @ vv
    if setting.forward_only:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]


def step(group: dist.ProcessGroup, setting: Setting, enable: bool = True) -> dict[str, Any]:
    """Largest errors of out and gradients, absolute and relative, after PyTorch's own unshard."""
    if enable:
        rs.enable_cp_dtensor_dispatcher()
    before = pytorch._cp_options.enable_load_balance, pytorch._cp_options.rotate_method
    pytorch._cp_options.enable_load_balance = setting.load_balance
    pytorch.set_rotate_method(setting.rotate)
    try:
        tensors, mask = inputs_of(setting, group.size())
        run = _in_context if setting.use_context else _by_module
        found = run(mesh_for(group, (group.size(),)), setting, [x.clone() for x in tensors], mask)
    finally:
        pytorch._cp_options.enable_load_balance, pytorch._cp_options.rotate_method = before
        if enable:
            rs.disable_cp_dtensor_dispatcher()
    expected = reference(setting, tensors, mask)
    answers: dict[str, Any] = {
        name: _distance(x.double(), wanted)
        for name, x, wanted in zip(("out", "dq", "dk", "dv"), found, expected, strict=False)
    }
    if setting.dtype == "bfloat16":
        answers["ulp"] = max(_steps(x, wanted) for x, wanted in list(zip(found, expected, strict=False))[::3])
    return answers


def _steps(found: Tensor, right: Tensor) -> int:
    """Largest number of bf16 values between the two, of out and dv."""

    def place(x: Tensor) -> Tensor:
        bits = x.to(torch.bfloat16).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((place(found) - place(right)).abs().max())


def _distance(found: Tensor, right: Tensor) -> tuple[float, float]:
    """Largest excess over the tolerances of fp32 and of bf16 (atol + rtol |x|); at most 0 where within."""
    gap = (found - right).abs()
    return float((gap - 2e-6 - 1e-5 * right.abs()).max()), float((gap - 1e-2 - 8e-3 * right.abs()).max())


def _keywords(setting: Setting, mask: Tensor | None) -> dict[str, Any]:
    keywords: dict[str, Any] = {"is_causal": setting.is_causal, "enable_gqa": setting.heads != setting.kv_heads}
    if setting.scale is not None:
        keywords["scale"] = setting.scale
    return keywords if mask is None else keywords | {"attn_mask": mask}


def _results(call: Any, setting: Setting, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> list[Tensor]:
    if setting.forward_only:
        with torch.no_grad():
            return [call(q, k, v, **keywords)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = call(*leaves, **keywords)
    return [out.detach(), *torch.autograd.grad(out.sum(), leaves)]


def _in_context(mesh: Any, setting: Setting, tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    buffers = tensors if mask is None else [*tensors, mask]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        call = F.scaled_dot_product_attention
        if setting.compiled:
            torch._dynamo.reset()
            call = torch.compile(_call_by_name, fullgraph=True, backend="aot_eager")
        with sdpa_kernel(SDPBackend.MATH) if setting.math else contextlib.nullcontext():
            results = _results(call, setting, *tensors, _keywords(setting, mask))
        for tensor in tensors:
            # The context gives buffers their old shape in place.
            tensor.requires_grad_(False)
    return pytorch.context_parallel_unshard(mesh, results, [2] * len(results))


def _call_by_name(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **keywords)


def _by_module(mesh: Any, setting: Setting, tensors: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    balancer = _HeadTailLoadBalancer(tensors[0].shape[2], mesh.size(), "cpu") if setting.load_balance else None
    buffers = tensors if mask is None else [*tensors, mask]
    q, k, v, *masks = pytorch._context_parallel_shard(mesh, buffers, [2] * len(buffers), load_balancer=balancer)
    module: nn.Module = Attention(setting.compiled)
    parallelize_module(module, mesh, pytorch._ContextParallel(2, pytorch._ContextParallel.AttentionType.SDPA))
    pytorch._enable_context_parallel_dispatcher()
    try:
        results = _results(module, setting, q, k, v, _keywords(setting, masks[0] if masks else None))
    finally:
        pytorch._disable_context_parallel_dispatcher()
    return pytorch.context_parallel_unshard(mesh, results, [2] * len(results), load_balancer=balancer)


def _in_order(group: dist.ProcessGroup, split: str) -> tuple[Any, list[Tensor], list[DTensor], list[Tensor]]:
    """A mesh, the whole inputs, the same as DTensors rearranged by a map, and the expected results so rearranged."""
    setting = Setting(forward_only=True)
    tensors, _ = inputs_of(setting, group.size())
    mesh = mesh_for(group, (group.size(),))
    order = torch.from_numpy(order_of(split, tensors[0].shape[2], "S", (group.size(),)))
    placed = [distribute_tensor(x[:, :, order], mesh, [Shard(2)], src_data_rank=None) for x in tensors]
    return mesh, tensors, placed, [x[:, :, order] for x in reference(setting, tensors, None)]


def every_way_in(group: dist.ProcessGroup) -> dict[str, float]:
    """By F, by a reference from before, by aten, and each in inference_mode; PyTorch's context between does no harm."""
    before = F.scaled_dot_product_attention
    mesh, tensors, placed, (right,) = _in_order(group, "head_tail")
    found = {}
    rs.enable_cp_dtensor_dispatcher(shard_map=rs.ShardMap.head_tail)
    try:
        calls = {
            "F": lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
            "before": lambda *x: before(*x, is_causal=True),
            "aten": lambda *x: torch.ops.aten.scaled_dot_product_attention(*x, None, 0.0, True),
        }
        for moment in ("first", "after PyTorch's context"):
            for name, call in calls.items():
                for mode in (contextlib.nullcontext(), torch.inference_mode()):
                    with mode:
                        out = call(*placed)
                    inside = type(mode).__name__
                    found[f"{name}, {moment}, {inside}"] = float((out.full_tensor().double() - right).abs().max())
            buffers = [x.clone() for x in tensors]
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
                pass
        plain = F.scaled_dot_product_attention(*tensors, is_causal=True)
        found["plain"] = float((plain - before(*tensors, is_causal=True)).abs().max())
    finally:
        rs.disable_cp_dtensor_dispatcher()
    return found


def leaves_all_as_it_was(group: dist.ProcessGroup) -> list[str]:
    """What differs after enabling and disabling in nests, around and inside PyTorch's context."""
    mesh = mesh_for(group, (group.size(),))

    def state() -> dict[str, Any]:
        dump = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
        return {
            "F": F.scaled_dot_product_attention,
            "implicit": DTensor._op_dispatcher._allow_implicit_replication,
            "buffers": pytorch._context_parallel_buffers,
            "disable": pytorch._disable_cp_dtensor_dispatcher,
            "rules": dict(rules._cp_strategy_contexts),
            "handlers": DTensor._op_dispatcher._custom_op_handlers,
            "kernels": [line.split(":")[0] for line in dump.splitlines()],
        }

    def ours() -> None:
        rs.enable_cp_dtensor_dispatcher()
        rs.enable_cp_dtensor_dispatcher(shard_map=rs.ShardMap.head_tail)
        rs.disable_cp_dtensor_dispatcher()
        with rs.sdpa(), rs.sdpa():
            pass
        rs.disable_cp_dtensor_dispatcher()

    def theirs() -> Any:
        buffers = [torch.randn(1, 1, 4 * group.size(), 2) for _ in range(3)]
        return context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2])

    def inside() -> None:
        with theirs():
            ours()

    def around() -> None:
        rs.enable_cp_dtensor_dispatcher()
        with theirs():
            pass
        rs.disable_cp_dtensor_dispatcher()

    def crossed() -> None:
        rs.enable_cp_dtensor_dispatcher()
        with theirs():
            rs.disable_cp_dtensor_dispatcher()

    def crossed_too() -> None:
        with theirs():
            rs.enable_cp_dtensor_dispatcher()
        rs.disable_cp_dtensor_dispatcher()

    def raising() -> None:
        with contextlib.suppress(KeyError), rs.sdpa():
            raise KeyError("body")

    # Once around, so that what PyTorch itself leaves changed is changed already.
    with theirs():
        pass
    first, wrong = state(), []
    for use in (ours, inside, around, crossed, crossed_too, raising):
        use()
        now = state()
        wrong += [f"{use.__name__}: {name}" for name in first if first[name] != now[name]]
    return wrong


def balancers(group: dist.ProcessGroup) -> dict[str, Any]:
    """Per-document and shuffled balancers are followed; one that was used unseen is refused."""
    world, length = group.size(), 16 * group.size()
    mesh = mesh_for(group, (world,))
    tensors, _ = inputs_of(Setting(), world)
    right = reference(Setting(forward_only=True), tensors, None)[0]
    lengths = [[length // 2, length // 2], [length // 4, 3 * length // 4]]
    balancer = _PerDocumentHeadTailLoadBalancer(lengths, world, "cpu")

    def run(unseen: bool) -> float:
        if not unseen:
            rs.enable_cp_dtensor_dispatcher()
        shards = pytorch._context_parallel_shard(mesh, [x.clone() for x in tensors], [2] * 3, load_balancer=balancer)
        if unseen:
            rs.enable_cp_dtensor_dispatcher()
        try:
            placed = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in shards]
            out = F.scaled_dot_product_attention(*placed, is_causal=True).to_local()
        finally:
            rs.disable_cp_dtensor_dispatcher()
        whole = pytorch.context_parallel_unshard(mesh, [out], [2], load_balancer=balancer)[0]
        return float((whole.double() - right).abs().max())

    found: dict[str, Any] = {"seen": run(False)}
    try:
        found["unseen"] = run(True)
    except NotImplementedError as error:
        found["unseen"] = str(error)
    pytorch._cp_options.enable_load_balance = True
    pytorch._dispatch_mode = pytorch._DispatchMode.MONKEY_PATCH
    return found


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """Calls that SDPA refuses, and a mask whose rows nobody sharded."""
    _, tensors, placed, _ = _in_order(group, "contiguous")
    mesh = placed[0].device_mesh
    length = tensors[0].shape[2]
    whole = DTensor.from_local(torch.ones(2, 1, length, length, dtype=torch.bool), mesh, [Shard(2)], run_check=False)
    calls = {
        "both": lambda: F.scaled_dot_product_attention(*placed, attn_mask=whole, is_causal=True),
        "rows": lambda: F.scaled_dot_product_attention(*placed, attn_mask=whole),
        "heads": lambda: F.scaled_dot_product_attention(placed[0][:, :2], *placed[1:]),
    }
    told = {}
    rs.enable_cp_dtensor_dispatcher()
    try:
        for name, call in calls.items():
            try:
                call()
                told[name] = "nothing"
            except (ValueError, RuntimeError) as error:
                told[name] = str(error)
    finally:
        rs.disable_cp_dtensor_dispatcher()
    return told


def dropout(group: dist.ProcessGroup) -> dict[str, float]:
    """Dropout inside PyTorch's context: the share that is dropped, and that the backward drops the same."""
    mesh = mesh_for(group, (group.size(),))
    q, k, v = (torch.zeros(2, 4, 32 * group.size(), 8) for _ in range(3))
    v.fill_(1)
    rs.enable_cp_dtensor_dispatcher()
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            v.requires_grad_()
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
            (dv,) = torch.autograd.grad(out.sum(), v)
            v.requires_grad_(False)
    finally:
        rs.disable_cp_dtensor_dispatcher()
    sums = torch.stack([out.sum(), dv.sum()]).double()
    dist.all_reduce(sums, group=group)
    return {"kept": float(sums[0]) * 0.75 / (2 * 4 * 32 * group.size() * 8), "gap": float(sums[0] / sums[1] - 1)}


def context_restores(group: dist.ProcessGroup) -> list[str]:
    """What differs in buffers after PyTorch's context, left as usual and by an exception, with ringspan enabled."""
    mesh = mesh_for(group, (group.size(),))
    wrong = []
    rs.enable_cp_dtensor_dispatcher()
    try:
        for raises in (False, True):
            tensors, mask = inputs_of(Setting(mask="bool"), group.size())
            buffers = [*tensors, mask]
            before = [(x.clone(), x.stride(), x.shape) for x in buffers]
            with contextlib.suppress(KeyError), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
                F.scaled_dot_product_attention(*buffers[:3], attn_mask=buffers[3])
                if raises:
                    raise KeyError("body")
            for index, (x, (values, stride, shape)) in enumerate(zip(buffers, before, strict=True)):
                if x.shape != shape or x.stride() != stride or not torch.equal(x, values):
                    wrong.append(f"buffer {index}, raises={raises}")
    finally:
        rs.disable_cp_dtensor_dispatcher()
    return wrong

"""Accelerators that are not there: their ops on CPU tensors, each a dense computation in float64 by the oracle.

They take what the real ones take and refuse the rest, and round results to the dtype of the query as those do.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import oracle
import torch
from npu_cases import kept, upper
from torch import Tensor

from ringspan import device

FORWARD = (
    "npu_fusion_attention_v3(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1.0, float keep_prob=1.0, "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, SymInt[]? prefix=None, "
    "Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
)
BACKWARD = (
    "npu_fusion_attention_grad_v3(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, "
    "*, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
    "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1.0, "
    "float keep_prob=1.0, int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
    "Tensor? seed=None, Tensor? offset=None, SymInt[]? prefix=None, Tensor? actual_seq_qlen=None, "
    "Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, "
    'str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)'
)
UPDATE = (
    "npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, "
    "Tensor cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, *, Tensor? actual_seq_qlen=None, "
    'str input_layout="SBH", str input_softmax_layout="") -> (Tensor, Tensor, Tensor)'
)


def wide(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def back(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.dtype)


class Rows(NamedTuple):
    """Rows of queries, some of their keys and values, and what their forward over all keys gave."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    dout: np.ndarray
    lse: np.ndarray


def gradients(rows: Rows, keep: np.ndarray, scale: float) -> tuple[np.ndarray, ...]:
    """dq, dk, dv of these keys."""
    q, k, v, out, dout, lse = rows
    group = q.shape[1] // k.shape[1]
    many_k, many_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    score = np.where(keep, scale * q @ many_k.swapaxes(-1, -2), -np.inf)
    weight = np.exp(score - lse[..., None])
    assert np.isfinite(weight).all()
    dscore = weight * (dout @ many_v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True))

    def summed(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], k.shape[1], group, *x.shape[2:]).sum(2)

    dk, dv = dscore.swapaxes(-1, -2) @ q, weight.swapaxes(-1, -2) @ dout
    return scale * dscore @ many_k, scale * summed(dk), summed(dv)


class Npu:
    """The fused-attention contract, as far as a step of a ring uses it; `calls` counts."""

    def __init__(self, with_update: bool = True) -> None:
        self.calls: Counter[str] = Counter()
        self.library = torch.library.Library("npu", "DEF")
        offered = {FORWARD: self.attend, BACKWARD: self.differentiate} | ({UPDATE: self.update} if with_update else {})
        for schema, run in offered.items():
            self.library.define(schema)
            self.library.impl(schema.split("(")[0], run, "CPU")

    def close(self) -> None:
        self.library._destroy()
        for name in [name for name in vars(torch.ops.npu) if name.startswith("npu_")]:
            delattr(torch.ops.npu, name)

    @staticmethod
    def keep(q: Tensor, k: Tensor, mask: Tensor | None, mode: int, pre: int, nxt: int) -> np.ndarray:
        rows, columns = q.shape[2], k.shape[2]
        if mask is None:
            return np.ones((rows, columns), bool)
        assert mask.dtype == torch.bool
        if mode in (2, 3, 4):
            assert torch.equal(mask, upper())
            if mode == 3:
                assert rows <= columns
            return kept(mode, rows, columns, pre, nxt)
        assert mode == 1
        assert mask.shape == (rows, columns)
        return ~mask.numpy()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str, *rest: Any, **more: Any
               ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls["forward"] += 1
        assert head_num == query.shape[1]
        assert layout == "BNSD"
        assert query.dtype != torch.float64
        names = ("pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens",
                 "inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode")  # fmt: skip
        given = dict(zip(names, rest, strict=False)) | more
        keep = self.keep(query, key, given.get("atten_mask"), given.get("sparse_mode", 0),
                         given.get("pre_tockens", 2**31 - 1), given.get("next_tockens", 2**31 - 1))  # fmt: skip
        q, k, v = wide(query), wide(key), wide(value)
        result = oracle.attend(q, k, v, keep[None], scale=given.get("scale", 1.0))
        score = given.get("scale", 1.0) * q @ np.repeat(k, q.shape[1] // k.shape[1], 1).swapaxes(-1, -2)
        highest = np.where(keep, score, -np.inf).max(-1)
        assert np.isfinite(highest).all(), "a step must leave out rows that keep nothing"
        statistics = [np.repeat(x[..., None], 8, -1) for x in (highest, np.exp(result.lse - highest))]
        none = torch.zeros(1, dtype=torch.int64)
        out, empty = back(result.out, query), query.new_empty(0)
        return (out, *(torch.from_numpy(x).float() for x in statistics), empty, none, none.clone())

    def differentiate(self, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, layout: str,
                      **given: Any) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls["backward"] += 1
        assert layout == "BNSD"
        for name in ("softmax_max", "softmax_sum"):
            assert given[name].shape == (*query.shape[:3], 8)
            assert given[name].dtype == torch.float32
        assert given["attention_in"].dtype == query.dtype
        keep = self.keep(query, key, given.get("atten_mask"), given.get("sparse_mode", 0),
                         given.get("pre_tockens", 2**31 - 1), given.get("next_tockens", 2**31 - 1))  # fmt: skip
        lse = wide(given["softmax_max"])[..., 0] + np.log(wide(given["softmax_sum"])[..., 0])
        arrays = [wide(x) for x in (query, key, value, given["attention_in"], dy)]
        found = gradients(Rows(*arrays, lse), keep, given["scale_value"])
        pairs = zip(found, (query, key, value), strict=True)
        return (*(back(x, like) for x, like in pairs), query.new_empty(0), torch.empty(0))

    def update(self, prev_out: Tensor, prev_max: Tensor, prev_sum: Tensor, out: Tensor, row_max: Tensor,
               row_sum: Tensor, **given: Any) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls["update"] += 1
        assert given.get("input_layout", "SBH") == "SBH"
        heads = row_max.shape[1]
        highest = np.maximum(wide(prev_max), wide(row_max))
        parts = [wide(x) * np.exp(wide(m) - highest) for m, x in ((prev_max, prev_sum), (row_max, row_sum))]
        total = parts[0] + parts[1]
        shares = [(part / total)[..., 0].transpose(2, 0, 1)[..., None] for part in parts]
        outs = [wide(x).reshape(*x.shape[:2], heads, -1) for x in (prev_out, out)]
        joined = (outs[0] * shares[0] + outs[1] * shares[1]).reshape(out.shape)
        return back(joined, out), torch.from_numpy(highest).float(), torch.from_numpy(total).float()


class Cuda:
    """aten's flash and memory-efficient ops, as far as a step of a ring uses them; `calls` counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_scaled_dot_product_flash_attention", self.flash, "CPU")
        self.library.impl("_scaled_dot_product_flash_attention_backward", self.flash_backward, "CPU")
        self.library.impl("_scaled_dot_product_efficient_attention", self.efficient, "CPU")
        self.library.impl("_scaled_dot_product_efficient_attention_backward", self.efficient_backward, "CPU")

    def close(self) -> None:
        self.library._destroy()

    @staticmethod
    def keep(q: Tensor, k: Tensor, is_causal: bool) -> np.ndarray:
        rows, columns = q.shape[2], k.shape[2]
        assert not is_causal or rows == columns, "where the corner is differs between versions"
        return kept(2 if is_causal else 1, rows, columns)

    @staticmethod
    def check(q: Tensor, k: Tensor, v: Tensor, flash: bool) -> None:
        assert q.shape[-1] % 8 == 0
        assert v.shape[-1] % 8 == 0
        if flash:
            assert q.dtype in (torch.bfloat16, torch.float16)
            assert q.shape[-1] == v.shape[-1] <= 256
        else:
            assert q.dtype != torch.float64
            assert q.shape[1] == k.shape[1] == v.shape[1]

    def flash(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
              return_debug_mask: bool = False, *, scale: float | None = None) -> tuple:  # fmt: skip
        self.calls["flash"] += 1
        self.check(query, key, value, flash=True)
        keep = self.keep(query, key, is_causal)
        result = oracle.attend(wide(query), wide(key), wide(value), keep[None], scale=scale)
        state = torch.zeros(2, dtype=torch.uint64)
        lse = torch.from_numpy(result.lse).float()
        return (
            back(result.out, query),
            lse,
            None,
            None,
            query.shape[2],
            key.shape[2],
            state,
            state[:0],
            query.new_empty(0),
        )

    def flash_backward(self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                       cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor,
                       offset: Tensor, *, scale: float | None = None) -> tuple:  # fmt: skip
        self.calls["flash backward"] += 1
        assert (max_q, max_k, dropout_p) == (query.shape[2], key.shape[2], 0.0)
        arrays = [wide(x) for x in (query, key, value, out, grad_out, lse)]
        found = gradients(Rows(*arrays), self.keep(query, key, is_causal), scale)
        return tuple(back(x, like) for x, like in zip(found, (query, key, value), strict=True))

    def masked(self, query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool) -> np.ndarray:
        keep = self.keep(query, key, is_causal)
        if bias is None:
            return keep
        assert bias.dtype == query.dtype
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(-1) == 1
        assert bias.stride(-2) % 16 == 0
        assert bool(((bias == 0) | (bias == -torch.inf)).all())
        return keep & (wide(bias) == 0)

    def efficient(self, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
                  dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None) -> tuple:  # fmt: skip
        self.calls["efficient"] += 1
        self.check(query, key, value, flash=False)
        keep = self.masked(query, key, attn_bias, is_causal)
        assert keep.any(-1).all(), "a step must leave out rows that keep nothing"
        q, k, v = wide(query), wide(key), wide(value)
        bias = np.where(np.broadcast_to(keep, (*q.shape[:3], k.shape[2])), 0.0, -np.inf)
        result = oracle.attend(q, k, v, np.ones((1, *bias.shape[2:]), bool), scale=scale, bias=bias)
        lse = np.pad(result.lse, ((0, 0), (0, 0), (0, -q.shape[2] % 32)), constant_values=np.inf)
        state = torch.zeros((), dtype=torch.int64)
        return back(result.out, query), torch.from_numpy(lse).float(), state, state.clone()

    def efficient_backward(self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None,
                           out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, dropout_p: float, wanted: list[bool],
                           is_causal: bool = False, *, scale: float | None = None) -> tuple:  # fmt: skip
        self.calls["efficient backward"] += 1
        assert wanted == [True, True, True, False]
        assert lse.shape[2] % 32 == 0
        rows = query.shape[2]
        assert bool((lse[:, :, rows:] == torch.inf).all())
        arrays = [wide(x) for x in (query, key, value, out, grad_out, lse[:, :, :rows])]
        found = gradients(Rows(*arrays), self.masked(query, key, attn_bias, is_causal), scale)
        return (*(back(x, like) for x, like in zip(found, (query, key, value), strict=True)), None)


KINDS = {
    "npu": (Npu, device.NpuSteps, device.npu_refusal),
    "npu without an update": (lambda: Npu(with_update=False), device.NpuSteps, device.npu_refusal),
    "cuda": (Cuda, device.CudaSteps, device.cuda_refusal),
}


def _loud(refusal: device.StepRefusal) -> device.StepRefusal:
    """On the CPU a refused call would run on this library's own kernels; a test must see the refusal."""

    def refuse(*call: Any) -> str:
        text = refusal(*call)
        if text:
            raise NotImplementedError(text)
        return text

    return refuse


@contextlib.contextmanager
def accelerator(kind: str, loud: bool = True) -> Iterator[Counter]:
    """CPU tensors pass for those of an accelerator while this lasts. Yields how often each of its ops was called."""
    make, steps, refusal = KINDS[kind]
    ops = make()
    registration = device.serve("CPU", steps(), _loud(refusal) if loud else refusal)
    try:
        yield ops.calls
    finally:
        registration.close()
        ops.close()

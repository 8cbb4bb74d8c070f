"""Attention of one head in float64, from the definition, and how far results are from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from shapes import Case
from torch import Tensor

_ROWS = 512  # query rows at a time: the scores of a block stay small


@dataclass(frozen=True)
class Reference:
    """float64 [seq_len, head_dim] of head `head`."""

    head: int
    out: Tensor
    grads: tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=1)
def reference_of(case: Case) -> Reference:
    """Output and gradients of one head of `case.inputs()`; `case.backward` is not read."""
    head = case.heads // 2
    q, k, v, dout = (x[0, head].double() for x in case.inputs())
    scale = case.head_dim**-0.5
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, case.seq_len, _ROWS):
        rows = slice(begin, min(begin + _ROWS, case.seq_len))
        scores = q[rows] @ k.T * scale
        if case.mask == "causal":
            later = torch.arange(case.seq_len) > torch.arange(rows.start, rows.stop)[:, None]
            scores.masked_fill_(later, -torch.inf)
        weights = scores.softmax(-1)
        out[rows] = weights @ v
        dweights = dout[rows] @ v.T
        delta = (dout[rows] * out[rows]).sum(-1, keepdim=True)
        dscores = weights * (dweights - delta) * scale
        dq[rows] = dscores @ k
        dk += dscores.T @ q[rows]
        dv += weights.T @ dout[rows]
    return Reference(head, out, (dq, dk, dv))


@dataclass(frozen=True)
class Distance:
    """Largest and root-mean-square difference, both relative to the largest reference value; the worst of several."""

    largest: float
    rms: float


def distance_to(expected: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> Distance:
    """How far each of `found` is from its `expected`; infinite where anything is not finite."""
    largest = rms = 0.0
    for want, got in zip(expected, found, strict=True):
        difference = got.double() - want.double()
        if not bool(difference.isfinite().all()):
            return Distance(float("inf"), float("inf"))
        top = want.double().abs().max().item()
        largest = max(largest, difference.abs().max().item() / top)
        rms = max(rms, difference.square().mean().sqrt().item() / top)
    return Distance(largest, rms)


def judge(dtype: str, backward: bool, ours: Distance, peer: Distance | None) -> str | None:
    """Why `ours` is not good enough, or None. fp32: a fixed limit; 16 bits: the error that PyTorch's kernel makes."""
    if dtype == "fp32":
        limit = 5e-5 if backward else 1e-5
        return None if ours.largest <= limit else f"largest error {ours.largest:.1e} is above {limit:.0e}"
    # Where PyTorch's kernel is not run: a few units in the last place of the largest value.
    limit = 1.05 * peer.rms if peer else {"bf16": 2e-3, "fp16": 2.5e-4}[dtype]
    return None if ours.rms <= limit else f"RMS error {ours.rms:.2e} is above {limit:.2e}"

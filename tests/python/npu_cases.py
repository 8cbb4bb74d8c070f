"""Calls of the contract's ops on small tensors, and the right answers: dense NumPy in float64, document by document."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import torch

EMPTY = np.float32(3.4028234663852886e38)  # the largest float
SHAPES = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.transpose(1, 2).flatten(2).transpose(0, 1),
}


@functools.cache
def upper() -> torch.Tensor:
    """The compressed mask of modes 2, 3, 4, 7 and 8."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@functools.cache
def prefix_mask() -> torch.Tensor:
    """The compressed mask of mode 6."""
    lower = torch.zeros(1024, 2048, dtype=torch.bool)
    lower[:, 1024:] = True
    return torch.cat([upper(), lower])


def kept(mode: int, q_len: int, kv_len: int, pre: int = 2**31 - 1, nxt: int = 2**31 - 1, prefix: int = 0) -> np.ndarray:
    """The pairs that a sparse mode keeps in one rectangle, without a full mask's own (contract 2.4)."""
    i, j, o = np.arange(q_len)[:, None], np.arange(kv_len)[None, :], kv_len - q_len
    return {
        0: (i - pre <= j) & (j <= i + nxt),
        1: np.ones((q_len, kv_len), bool),
        2: j <= i,
        3: j <= i + o,
        4: (i + o - pre <= j) & (j <= i + o + nxt),
        5: np.ones((q_len, kv_len), bool),
        6: (j <= i + o) | (j < prefix),
    }[mode]


@dataclass
class Call:
    """Inputs in BNSD float64 (TND: batch 1) and the keyword arguments of the op."""

    q_len: int = 9
    kv_len: int = 13
    batch: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    qk_dim: int = 8
    v_dim: int = 5
    dtype: str = "float32"
    layout: str = "BNSD"
    scale: float = 0.4
    seed: int = 1
    keep: np.ndarray | None = None  # [B or 1, Sq, Skv]
    bias: np.ndarray | None = None  # [B, N, Sq, Skv], added as it is
    pse: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    dropped: np.ndarray | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> list[np.ndarray]:
        """q, k, v, dout, rounded to the dtype."""
        q, k, v, dout = oracle.draw(
            self.seed, max(self.q_len, self.kv_len), self.q_heads, self.kv_heads, (self.qk_dim, self.v_dim), self.batch
        )
        cut = (q[:, :, : self.q_len], k[:, :, : self.kv_len], v[:, :, : self.kv_len], dout[:, :, : self.q_len])
        dtype = getattr(torch, self.dtype)
        return [torch.from_numpy(np.ascontiguousarray(x)).to(dtype).double().numpy() for x in cut]

    def in_layout(self, x: torch.Tensor) -> torch.Tensor:
        """A [B, N, S, D] tensor as the op takes it."""
        return x[0].transpose(0, 1) if self.layout == "TND" else SHAPES[self.layout](x)

    def out_of_layout(self, x: torch.Tensor, heads: int) -> np.ndarray:
        """The inverse, in float64."""
        if self.layout == "TND":
            x = x.transpose(0, 1)[None]
        elif self.layout != "BNSD":
            x = x.transpose(0, 1) if self.layout == "SBH" else x
            x = (x if self.layout == "BSND" else x.unflatten(2, (heads, -1))).transpose(1, 2)
        return x.detach().double().numpy()

    def expect(self) -> oracle.Result:
        """The right answer."""
        q, k, v, dout = self.inputs()
        keep = np.ones((1, self.q_len, self.kv_len), bool) if self.keep is None else self.keep
        bias = self.bias
        if self.pse is not None:
            full = (self.batch, self.q_heads, self.q_len, self.kv_len)
            pse = self.scale * np.broadcast_to(self.pse.detach().double().numpy(), full)
            bias = pse if bias is None else bias + pse
        sink = None if self.sink is None else self.sink.detach().double().numpy()
        terms = {} if self.dropped is None else {"dropped": self.dropped, "dropout_p": 1 - self.arguments["keep_prob"]}
        return oracle.attend(q, k, v, keep, dout, scale=self.scale, sink=sink, bias=bias, **terms)

    def leaves(self) -> list[torch.Tensor]:
        """q, k, v in the layout, with gradients."""
        dtype = getattr(torch, self.dtype)
        return [self.in_layout(torch.from_numpy(x).to(dtype)).contiguous().requires_grad_() for x in self.inputs()[:3]]

    def keywords(self) -> dict[str, Any]:
        """All keyword arguments of the forward."""
        given = {"pse": self.pse, "sink": self.sink}
        return {"scale": self.scale} | {k: v for k, v in given.items() if v is not None} | self.arguments


def documents(q_lengths: list[int], kv_lengths: list[int], mode: int, **changes: Any) -> np.ndarray:
    """keep [1, T1, T2] of packed documents; modes 7 and 8 by their definition."""
    keep = np.zeros((1, sum(q_lengths), sum(kv_lengths)), bool)
    filled = [index for index, length in enumerate(q_lengths) if length > 0]
    band = {7: filled[-1:], 8: filled[:1]}.get(mode)
    q = kv = 0
    for index, (rows, columns) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        own, numbers = mode, dict(changes)
        if "prefix" in numbers:
            numbers["prefix"] = numbers["prefix"][index]
        if mode in (7, 8):
            own = 4 if [index] == band else {7: 3, 8: 2}[mode]
        keep[0, q : q + rows, kv : kv + columns] = kept(own, rows, columns, **numbers)
        q, kv = q + rows, kv + columns
    return keep


def statistics(result: oracle.Result, call: Call) -> tuple[np.ndarray, np.ndarray]:
    """softmax_max and softmax_sum as [B, N, S], an empty row as the contract has it."""
    q, k, _, _ = call.inputs()
    keep = np.ones((1, call.q_len, call.kv_len), bool) if call.keep is None else call.keep
    score = call.scale * (q @ np.repeat(k, call.q_heads // call.kv_heads, 1).swapaxes(-1, -2))
    if call.pse is not None:
        score = score + call.scale * call.pse.detach().double().numpy()
    if call.bias is not None:
        score = score + call.bias
    score = np.where(keep[:, None], score, -np.inf)
    highest = score.max(-1, initial=-np.inf)
    if call.sink is not None:
        highest = np.maximum(highest, call.sink.detach().double().numpy()[None, :, None])
    empty = ~np.isfinite(result.lse)
    with np.errstate(invalid="ignore"):
        total = np.where(empty, EMPTY, np.exp(result.lse - highest))
    return np.where(empty, -EMPTY, highest), total

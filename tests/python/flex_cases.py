"""mask_mods and score_mods, and FlexAttention as its definition has it: one call of the mod for each pair.

Shares no code with the product: no vmap, no bands, no kernel; a dense softmax in float64 with PyTorch's autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

SEQ = 13
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8

_IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3])
_IDS_BY_BATCH = torch.stack([_IDS, _IDS.flip(0)])
_PREFIX = torch.tensor([3, 7])
_RANDOM = torch.from_numpy(np.random.default_rng(1).random((SEQ, SEQ)) > 0.4)

MASKS: dict[str, Callable] = {
    "causal": lambda b, h, q, kv: q >= kv,
    "sliding window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 4),
    "both sides": lambda b, h, q, kv: (q - kv).abs() < 3,
    "documents": lambda b, h, q, kv: (_IDS[q] == _IDS[kv]) & (q >= kv),
    "documents by batch": lambda b, h, q, kv: (_IDS_BY_BATCH[b, q] == _IDS_BY_BATCH[b, kv]) & (q >= kv),
    "prefix": lambda b, h, q, kv: (q >= kv) | (kv < 5),
    "prefix by batch": lambda b, h, q, kv: (q >= kv) | (kv < _PREFIX[b]),
    "chunked": lambda b, h, q, kv: (q // 4 == kv // 4) & (q >= kv),
    "sink tokens and window": lambda b, h, q, kv: (q >= kv) & ((q - kv < 3) | (kv < 2)),
    "random": lambda b, h, q, kv: _RANDOM[q, kv],
    "random, one index at a time": lambda b, h, q, kv: _RANDOM[q][kv],
    "by head": lambda b, h, q, kv: (q - kv).abs() <= h,
    "by batch and head": lambda b, h, q, kv: (q + b >= kv) & ((q + kv) % (h + 2) != 0),
    "every third": lambda b, h, q, kv: (q - kv) % 3 == 0,
    "empty rows": lambda b, h, q, kv: (q > 3) & (q >= kv) & (q != 8),
    "nothing": lambda b, h, q, kv: q < 0 * kv,
    "everything": noop_mask,
}


def _tables() -> dict[str, Tensor]:
    """Tensors that score_mods capture, float64 leaves that ask for gradients."""
    source = np.random.default_rng(2)
    shapes = {"relative": (HEADS, 2 * SEQ - 1), "key": (BATCH, SEQ), "pair": (SEQ, SEQ), "slope": (HEADS,)}
    return {name: torch.from_numpy(source.standard_normal(shape)).requires_grad_() for name, shape in shapes.items()}


INF = float("inf")


def _mods(t: dict[str, Tensor]) -> dict[str, tuple[Callable, tuple[str, ...]]]:
    def softcap(score: Tensor) -> Tensor:
        return 1.5 * torch.tanh(score / 1.5)

    def relative(h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return t["relative"][h, q - kv + SEQ - 1]

    everything = {
        "identity": lambda s, b, h, q, kv: s,
        "positions": lambda s, b, h, q, kv: s + 0.25 * (kv - q),
        "whole numbers": lambda s, b, h, q, kv: s + (q - kv) % 3 - 1,
        "alibi": lambda s, b, h, q, kv: s + t["slope"][h] * (kv - q),
        "relative": lambda s, b, h, q, kv: s + relative(h, q, kv),
        "by key": lambda s, b, h, q, kv: t["key"][b, kv] + s,
        "by query, in two steps": lambda s, b, h, q, kv: s - t["pair"][q][0],
        "taken from": lambda s, b, h, q, kv: t["pair"][q, kv] - s,
        "temperature": lambda s, b, h, q, kv: 0.3 * s / torch.tensor(1.5),
        "negative": lambda s, b, h, q, kv: -(s / 2) + 1,
        "softcap": lambda s, b, h, q, kv: softcap(s),
        "negative softcap": lambda s, b, h, q, kv: -2.0 * (s * 0.7).tanh(),
        "softcap and bias": lambda s, b, h, q, kv: softcap(s) + relative(h, q, kv),
        "bias, then factor": lambda s, b, h, q, kv: 0.5 * (softcap(s).to(torch.float64) + relative(h, q, kv)) - 2,
        "causal": lambda s, b, h, q, kv: torch.where(q >= kv, s, -INF),
        "causal, filled": lambda s, b, h, q, kv: s.masked_fill(q < kv, -INF),
        "causal, the other way": lambda s, b, h, q, kv: torch.where(q < kv, torch.full_like(s, -INF), s),
        "causal, added": lambda s, b, h, q, kv: s + torch.where(q >= kv, 0.0, -INF),
        "bias, then mask": lambda s, b, h, q, kv: torch.where((q - kv).abs() <= h, s + t["key"][b, kv], -INF),
        "mask, then bias": lambda s, b, h, q, kv: torch.where(q >= kv, s, -INF) * 2 + t["pair"][q, kv],
        "bias in a part": lambda s, b, h, q, kv: torch.where(kv < 4, s + t["pair"][q, kv], s),
        "two masks": lambda s, b, h, q, kv: torch.where(q - kv < 5, torch.where(q >= kv, s, -INF), -INF),
        "is it a tensor": lambda s, b, h, q, kv: s + 1.0 * q.to(s.dtype) if isinstance(s, Tensor) else s,
    }
    needs = {"alibi": ("slope",), "relative": ("relative",), "by key": ("key",), "by query, in two steps": ("pair",)}
    needs |= {"taken from": ("pair",), "softcap and bias": ("relative",), "bias, then factor": ("relative",)}
    needs |= {"bias, then mask": ("key",), "mask, then bias": ("pair",), "bias in a part": ("pair",)}
    return {name: (mod, needs.get(name, ())) for name, mod in everything.items()}


SCORE_MODS = tuple(_mods(_tables()))


def score_mod(name: str) -> tuple[Callable, list[Tensor]]:
    """A score_mod, and the tensors with a gradient that it captures."""
    tables = _tables()
    mod, needs = _mods(tables)[name]
    return mod, [tables[need] for need in needs]


def inputs(q_heads: int = HEADS, seq_len: int = SEQ) -> list[Tensor]:
    """q, k, v, dout of the whole sequences, float64."""
    return [torch.from_numpy(x) for x in oracle.draw(3, seq_len, q_heads, KV_HEADS, DIM, batch=BATCH)]


def kept_pairs(mask_mod: Callable, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Bool [batch, heads, q_len, kv_len], by one call for each pair."""
    flat = [
        bool(mask_mod(*(torch.tensor(index) for index in place))) for place in np.ndindex(batch, heads, q_len, kv_len)
    ]
    return torch.tensor(flat, dtype=torch.bool).reshape(batch, heads, q_len, kv_len)


def attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, mod: Callable | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mod is not None:
        score = torch.stack(
            [
                mod(score[b, h, i, j], *map(torch.tensor, (b, h, i, j))).to(score.dtype)
                for b, h, i, j in np.ndindex(*score.shape)
            ]
        ).reshape(score.shape)
    score = score.masked_fill(~keep, -INF)
    empty = (score == -INF).all(-1, keepdim=True)
    weight = torch.softmax(score.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(score.masked_fill(empty, 0.0), -1).masked_fill(empty[..., 0], -INF)
    return weight @ v, lse


def blocks_by_hand(full: bool = True, mod: Callable | None = None) -> BlockMask:
    """13 positions in blocks of 4, one rule for all; what follows the used indices is garbage, as it may be."""
    counts = torch.tensor([[[1, 2, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 99, 99, 99], [3, 0, -5, 2], [1, 1, 1, 1], [3, 3, 3, 3]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[1, 0, 1, 2]]], dtype=torch.int32)
    full_indices = torch.tensor([[[[2, 0, 0, 0], [0, 0, 0, 0], [1, 7, 7, 7], [0, 2, 9, 9]]]], dtype=torch.int32)
    lists = (counts, indices, full_counts, full_indices) if full else (counts, indices)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, mask_mod=mod, seq_lengths=(SEQ, SEQ), compute_q_blocks=False)

"""The rows of the bench: shapes, names, counts of operations, and the targets that they are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = 8


@dataclass(frozen=True)
class Case:
    """One attention problem: batch 1, as many query heads as KV heads."""

    dtype: str
    mask: str  # "full" or "causal"; in rows schedules/... also "window" or "documents", whose pairs are not counted
    seq_len: int
    head_dim: int
    backward: bool = False
    heads: int = HEADS

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return DTYPES[self.dtype]

    @property
    def kept_pairs(self) -> int:
        """(query, key) pairs that the mask keeps, of one head."""
        return self.seq_len * (self.seq_len + 1) // 2 if self.mask == "causal" else self.seq_len**2

    def flops(self, forward: bool, backward: bool) -> int:
        """Two products forward, five backward, 2 operations an element; only kept pairs count."""
        products = 2 * forward + 5 * backward
        return products * 2 * self.kept_pairs * self.head_dim * self.heads

    def inputs(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """Query, key, value and gradient of the output: [1, heads, seq_len, head_dim]."""
        generator = torch.Generator().manual_seed(seed)
        shape = (4, 1, self.heads, self.seq_len, self.head_dim)
        return torch.randn(shape, generator=generator).to(self.torch_dtype).unbind()


@dataclass(frozen=True)
class Target:
    """What a row should reach: at least `ratio` times as fast as the peer, and `share` of the machine's peak."""

    ratio: float | None = None
    share: float | None = None


# (dtype, backward) -> ratio with a full mask, with a causal one.
_RATIOS = {
    ("fp32", False): (1.15, 1.35),
    ("fp32", True): (1.25, 1.5),
    ("bf16", False): (2.0, 2.4),
    ("bf16", True): (1.65, 2.0),
    ("fp16", False): (1.5, 1.8),
    ("fp16", True): (8.0, 8.0),
}


def kernel_target(case: Case) -> Target:
    """Of our kernel against PyTorch's, both in one process."""
    full, causal = _RATIOS[case.dtype, case.backward]
    if case.dtype == "fp32" and not case.backward and case.seq_len <= 1024:
        causal = 1.5
    share = {("fp32", False): 0.80, ("fp32", True): 0.80, ("bf16", True): 0.74}.get((case.dtype, case.backward))
    if case.dtype == "bf16" and not case.backward:
        share = 0.75 if case.head_dim >= 128 else 0.68
    return Target(causal if case.mask == "causal" else full, share)


def decode_target(dtype: str) -> Target:
    """One query over many keys: bound by memory, `share` is of its reading speed."""
    return Target({"fp32": 2.0, "bf16": 4.0}[dtype], 0.70)


# Two ranks of one thread each. Times our own single process of two threads, at most; from 4096 positions on.
RING_SLOWDOWN = {"forward": 1.03, "forward_backward": 1.05}
# The best other schedule over the ring, at most.
SCHEDULE_OVER_RING = 1.0
# As fast as PyTorch's ring, at least.
RING_RATIO = {"fp32": 1.35, "bf16": 1.9}
RING_MIN_SEQ_LEN = 4096

"""What the ranks attend to: one random sequence, the shard of it that a rank holds, and a float64 reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringspan.bench.config import Config

NAMES = ("out", "dq", "dk", "dv")
# Dense scores of one head after another in float64: about a second on one core at this many.
REFERENCE_MAX_SCORES = 2**25


class Inputs:
    """One rank's view of the problem. All tensors BNSD, in the dtype of the run, on `device`.

    whole: query, key, value and (backward) the gradient of the output, of the whole sequence, without gradients.
    local: this rank's rows of them; query, key and value are leaves that require gradients where backward is measured.
    """

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(config.seed)
        q_shape, kv_shape, _ = config.shapes()
        shapes = [q_shape, kv_shape, kv_shape, *([q_shape] if config.backward else [])]
        self.whole = [torch.randn(shape, generator=generator).to(device, config.torch_dtype) for shape in shapes]
        smap = config.shard_map()
        self.local = [smap.shard(x, rank, dim=2).contiguous() for x in self.whole]
        for x in self.local[:3]:
            x.requires_grad_(config.backward)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of this rank's output, or None where backward is not measured."""
        return self.local[3] if len(self.local) > 3 else None


def has_reference(config: Config) -> bool:
    """Whether the problem is small enough for `reference_of`."""
    return config.num_heads * config.seq_len**2 <= REFERENCE_MAX_SCORES


def reference_of(whole: list[Tensor], causal: bool) -> list[Tensor]:
    """Output, and with a gradient given also dq, dk, dv, of the whole sequence: dense attention in float64, on the CPU.

    softmax(q k^T / sqrt(D)) v and its derivatives by PyTorch's autograd; one KV head after another.
    """
    q, k, v, *gradient = (x.detach().double().cpu() for x in whole)
    shared = q.shape[1] // k.shape[1]
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    keep = keep.tril() if causal else keep
    parts: list[list[Tensor]] = []
    for head in range(k.shape[1]):
        used = slice(head * shared, (head + 1) * shared)
        leaves = [q[:, used].clone(), k[:, head : head + 1].clone(), v[:, head : head + 1].clone()]
        for x in leaves:
            x.requires_grad_(bool(gradient))
        scores = leaves[0] @ leaves[1].transpose(-2, -1) / math.sqrt(q.shape[-1])
        out = torch.softmax(scores.masked_fill(~keep, -math.inf), -1) @ leaves[2]
        grads = torch.autograd.grad(out, leaves, gradient[0][:, used]) if gradient else ()
        parts.append([out.detach(), *grads])
    return [torch.cat(part, 1) for part in zip(*parts, strict=True)]


def empty_reference(config: Config) -> list[Tensor]:
    """Tensors of the shapes that `reference_of` returns, for ranks that receive it."""
    q_shape, kv_shape, _ = config.shapes()
    shapes = [q_shape, *([q_shape, kv_shape, kv_shape] if config.backward else [])]
    return [torch.empty(shape, dtype=torch.float64) for shape in shapes]

"""A transformer small enough to train anywhere in a moment, its data, and one process that trains it: the judge.

The model is given its attention. The judge's is dense, in float64 and written out here: nothing of the product.
Shapes: B sequences, S this rank's rows, N query heads, M KV heads, D head dim, C model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import oracle
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 11, 12, 4, 2, 6, 20, 2
RATE = 0.3
# q [B, N, S, D], k and v [B, M, S, D], layer -> [B, N, S, D]
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, base 10000, pairs (d, d + D/2); positions [S]."""
    half = x.shape[-1] // 2
    angle = positions[:, None].to(x.dtype) * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


class Block(nn.Module):
    """Attention and MLP. The number of heads is read off the projections: under TP they are local ones."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """[B, S, C] to [B, S, C]."""
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = attention(rotate(q, positions), rotate(k, positions), v, self.layer)
        x = x + self.wo(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Tokens [B, S] to logits [B, S, VOCABULARY]; a pipeline stage drops what is not its own."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant  # of the checkpoint around each block; None = no checkpoint
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleDict({str(layer): Block(layer) for layer in range(LAYERS)})
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            if self.reentrant is None:
                x = block(x, positions, attention)
            else:
                x = checkpoint(block, x, positions, attention, use_reentrant=self.reentrant)
        return x if self.head is None else self.head(x)


def build(reentrant: bool | None = None) -> Decoder:
    """The same weights each time, float64."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return Decoder(reentrant).double()


@dataclass(frozen=True)
class Batch:
    """Whole sequences [B, S]: inputs, targets, and which targets count."""

    tokens: Tensor
    targets: Tensor
    valid: Tensor


def draw(seed: int, batch: int, seq_len: int) -> Batch:
    """Sequences whose numbers of valid targets differ much: the share grows from one to the next."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCABULARY, (2, batch, seq_len), generator=generator)
    share = (torch.arange(batch) + 1.0)[:, None] / (batch + 1)
    valid = torch.rand(batch, seq_len, generator=generator) < share
    valid[:, -1] |= ~valid.any(1)
    return Batch(tokens, targets, valid)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """[B, S]"""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def dense(keep: np.ndarray, dropout_p: float = 0.0, seed: int = 0) -> Attention:
    """Attention of whole sequences under `keep` [B or 1, S, S]; layer n draws its dropout with offset n."""
    kept = torch.from_numpy(keep)[:, None]

    def attention(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~kept, float("-inf"))
        weights = scores.softmax(-1)
        if dropout_p > 0:
            shape = (*q.shape[:3], k.shape[2])
            dropped = torch.from_numpy(oracle.dropped_pairs(dropout_p, seed, layer, shape))
            weights = weights.masked_fill(dropped, 0) / (1 - dropout_p)
        return weights @ v

    return attention


Steps = list[tuple[float, dict[str, Tensor]]]  # displayed loss and gradients by parameter, of each step


def one_process(batches: list[Batch], attention: Attention, z_weight: float = 0.0) -> Steps:
    """SGD, one step for each batch; the loss is the mean over all its valid tokens, and z_weight times that of z**2."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    for batch in batches:
        optimizer.zero_grad()
        logits = model(batch.tokens, torch.arange(batch.tokens.shape[1]), attention)
        losses = token_losses(logits, batch.targets) + z_weight * logits.logsumexp(-1) ** 2
        loss = losses[batch.valid].mean()
        loss.backward()
        steps.append((float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}))
        optimizer.step()
    return steps


def worst_errors(found: Steps, right: Steps) -> dict[str, float]:
    """Relative errors, the worst of all steps and parameters, of the displayed loss and of the gradients apart.

    `found` may hold a part of the parameters; of each step it must hold some.
    """
    assert len(found) == len(right)
    errors = {"loss": 0.0, "gradients": 0.0}
    for (loss, grads), (right_loss, right_grads) in zip(found, right, strict=True):
        assert grads
        errors["loss"] = max(errors["loss"], abs(loss - right_loss) / abs(right_loss))
        for name, grad in grads.items():
            error = float((grad - right_grads[name]).abs().max() / right_grads[name].abs().max())
            errors["gradients"] = max(errors["gradients"], error if np.isfinite(error) else np.inf)
    return errors

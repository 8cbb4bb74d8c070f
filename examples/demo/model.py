"""A small decoder-only transformer that never looks at its neighbours' tokens: only the attention it is given does.

Shapes: B batch, S this rank's rows, N query heads, M kv heads, D head dim, C model dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from config import ModelConfig
from torch import Tensor, nn

# query [B, S, N, D], key and value [B, S, M, D] -> [B, S, N, D], rows of this rank.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def rope_tables(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [S, D / 2], of the *global* positions int64 [S] of this rank's rows."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = positions.double()[:, None] * base**-exponents
    return angles.cos().float(), angles.sin().float()


def rotate(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of each head by the position of its row."""
    first, second = x_BSND.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        q_dim, kv_dim = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.attention_norm = nn.RMSNorm(config.dim)
        self.project_qkv = nn.Linear(config.dim, q_dim + 2 * kv_dim, bias=False)
        self.project_out = nn.Linear(q_dim, config.dim, bias=False)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BSC: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Returns [B, S, C]."""
        config = self.config
        qkv = self.project_qkv(self.attention_norm(x_BSC))
        qkv = qkv.unflatten(-1, (config.heads + 2 * config.kv_heads, config.head_dim))
        query, key, value = qkv.split([config.heads, config.kv_heads, config.kv_heads], dim=2)
        mixed = attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        x_BSC = x_BSC + self.project_out(mixed.flatten(2))
        return x_BSC + self.down(F.gelu(self.up(self.mlp_norm(x_BSC))))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, inputs_BS: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Logits [B, S, vocabulary] of this rank's rows; `positions` int64 [S], global."""
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_base)
        x = self.embedding(inputs_BS)
        for block in self.blocks:
            x = block(x, cos, sin, attention)
        return self.head(self.norm(x))

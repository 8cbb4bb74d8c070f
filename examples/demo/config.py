"""What one training run is: sizes, seed, and over how many processes it is spread."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """A byte-level decoder: `kv_heads` divides `heads` (grouped-query attention)."""

    layers: int = 3
    dim: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden_dim: int = 1024
    vocabulary: int = 256
    rope_base: float = 10000.0


@dataclass(frozen=True)
class RunConfig:
    """One run. Two runs that differ in `world` and `threads` only compute the same losses."""

    world: int = 1
    threads: int = 1  # of each process
    steps: int = 12
    seq_len: int = 8192
    mask: str = "causal"  # or "documents": causal inside of each file
    seed: int = 1234
    learning_rate: float = 2e-3
    group_timeout_s: float = 120.0
    model: ModelConfig = field(default_factory=ModelConfig)

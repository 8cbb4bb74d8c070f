"""Attention on DTensors, and the hooks into PyTorch's own context parallelism. See docs/dtensor.md."""

# First: its import ends with the registration of our rules (ringspan/__init__.py), which imports what is beside this.
import torch.distributed.tensor  # noqa: F401

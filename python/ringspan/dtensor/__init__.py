"""Attention on DTensors, and the hooks into PyTorch's own context parallelism. See docs/dtensor.md."""

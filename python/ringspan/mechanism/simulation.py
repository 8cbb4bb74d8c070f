"""Context parallel attention in one process: the same sums as on many ranks, without the messages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringspan.mechanism.arguments import (
    ACCUMULATOR,
    Statistics,
    check_finite,
    check_float,
    check_leading,
    check_same_dtype,
    check_same_size,
    check_size,
)
from ringspan.mechanism.softmax import finish_softmax, local_softmax_statistics, merge_softmax_statistics
from ringspan.mechanism.split import split_sequence_contiguous


def context_parallel_attention_sim(query: Tensor, key: Tensor, value: Tensor, cp_size: int) -> Tensor:
    """softmax(query key^T / sqrt(D)) value, with the keys taken in `cp_size` parts, one after the other.

    query: [..., Sq, D] of any length: the rows of one rank, or of all. key: [..., S, D] and value: [..., S, Dv], whole
    sequences that `cp_size` divides. One floating dtype; batch axes broadcast. Returns [..., Sq, Dv] in that dtype;
    scores and sums are float32 (float64 for float64), rounded once at the end. Differentiable in all three.
    ValueError for nan and infinities, given or met in a score, for an empty sequence, for a length that `cp_size` does
    not divide, and for shapes or dtypes that do not fit.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_float(name, tensor)
        check_finite(name, tensor)
        check_same_dtype("query", query, name, tensor)
    check_same_size("query", query, "key", key, dims=(-1, -1))
    check_same_size("key", key, "value", value, dims=(-2, -2))
    check_leading("query", query, "key", key)
    check_leading("key", key, "value", value)
    if 0 in query.shape[-2:]:
        raise ValueError(f"query has shape {list(query.shape)}; give >= 1 position (axis -2) and >= 1 feature")
    cp_size = check_size("cp_size", cp_size)

    dtype = query.dtype
    query, key, value = (tensor.to(ACCUMULATOR[dtype]) for tensor in (query, key, value))
    key_shards = split_sequence_contiguous(key, cp_size)
    value_shards = split_sequence_contiguous(value, cp_size)
    scale = 1 / math.sqrt(query.shape[-1])
    running: Statistics | None = None
    for key_shard, value_shard in zip(key_shards, value_shards, strict=True):
        # Scaled first: a product that only overflows before scaling is a good score.
        scores = torch.matmul(query * scale, key_shard.transpose(-2, -1))
        # A score beyond the range would pass for a masked key.
        check_finite("query times key", scores)
        running = merge_softmax_statistics(running, local_softmax_statistics(scores, value_shard))
    assert running is not None  # there is at least one shard
    return finish_softmax(running).to(dtype)

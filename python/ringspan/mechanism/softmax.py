"""Softmax over keys that arrive in parts: what a part leaves behind, and how two parts become one.

For one query row with scores s_j over the keys j of a part, and values v_j:

    maximum      m = max_j s_j
    denominator  l = sum_j exp(s_j - m)
    numerator    o = sum_j exp(s_j - m) v_j

Attention over these keys is o / l. Two parts join as

    m = max(m1, m2)    l = l1 exp(m1 - m) + l2 exp(m2 - m)    o = o1 exp(m1 - m) + o2 exp(m2 - m)

which may be done in any order and any grouping. The part without keys is the identity: m = -inf, l = 0, o = 0.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867); over ranks: Liu,
Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.mechanism.arguments import (
    ACCUMULATOR,
    Statistics,
    check_below_infinity,
    check_finite,
    check_float,
    check_leading,
    check_same_dtype,
    check_same_size,
    check_statistics,
)


def local_softmax_statistics(scores: Tensor, value_shard: Tensor) -> Statistics:
    """What one part of the keys contributes, not yet divided.

    scores: [..., Sq, Sk], scaled, natural units; -inf masks a key. value_shard: [..., Sk, Dv], finite, same dtype;
    batch axes broadcast. Returns maximum [..., Sq, 1], denominator [..., Sq, 1] and numerator [..., Sq, Dv], in float32
    (float64 for float64 arguments). A row whose keys are all masked, and a part with Sk = 0, gives (-inf, 0, 0).
    Differentiable in both. ValueError for nan or +inf scores, for values that are not finite, and for shapes or dtypes
    that do not fit.
    """
    check_float("scores", scores)
    check_float("value_shard", value_shard)
    check_same_dtype("scores", scores, "value_shard", value_shard)
    check_same_size("scores", scores, "value_shard", value_shard, dims=(-1, -2))
    check_leading("scores", scores, "value_shard", value_shard)
    check_below_infinity("scores", scores)
    check_finite("value_shard", value_shard)

    scores, value_shard = (tensor.to(ACCUMULATOR[scores.dtype]) for tensor in (scores, value_shard))
    if scores.shape[-1] == 0:
        maximum = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    else:
        maximum = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - _base(maximum))
    denominator = weights.sum(dim=-1, keepdim=True)
    numerator = torch.matmul(weights, value_shard)
    check_finite("the numerator of scores and value_shard", numerator)
    return maximum, denominator, numerator


def merge_softmax_statistics(running: Statistics | None, local: Statistics) -> Statistics:
    """The statistics of two parts of the keys together.

    running, local: (maximum [..., Sq, 1], denominator [..., Sq, 1], numerator [..., Sq, Dv]), equal shapes and dtype.
    `running` None stands for no keys yet: the result is `local`. Both sides are brought to the larger of their maxima
    before they are added, so no exponent is ever above 0. Differentiable. ValueError for nan, for an infinity other
    than a maximum of -inf, and for shapes or dtypes that differ.
    """
    local = check_statistics("local", local)
    if running is None:
        return local
    running = check_statistics("running", running)
    for part, ours, theirs in zip(("maximum", "denominator", "numerator"), running, local, strict=True):
        check_same_dtype(f"{part} of running", ours, f"{part} of local", theirs)
        if ours.shape != theirs.shape:
            raise ValueError(
                f"{part} of running has shape {list(ours.shape)}, but that of local {list(theirs.shape)}; "
                "give statistics of the same rows"
            )

    running_max, running_denominator, running_numerator = running
    local_max, local_denominator, local_numerator = local
    merged_max = torch.maximum(running_max, local_max)
    base = _base(merged_max)
    running_scale = torch.exp(running_max - base)
    local_scale = torch.exp(local_max - base)
    merged_denominator = running_denominator * running_scale + local_denominator * local_scale
    merged_numerator = running_numerator * running_scale + local_numerator * local_scale
    check_finite("the merged numerator", merged_numerator)
    return merged_max, merged_denominator, merged_numerator


def finish_softmax(statistics: Statistics) -> Tensor:
    """Attention from the statistics of all keys: numerator / denominator [..., Sq, Dv], 0 in a row without keys."""
    _, denominator, numerator = check_statistics("statistics", statistics)
    empty = denominator == 0
    # Dividing 0 by 0 and choosing afterwards would still send nan backwards.
    return torch.where(empty, 0.0, numerator / torch.where(empty, 1.0, denominator))


def _base(maximum: Tensor) -> Tensor:
    """What exponents are taken relative to: the maximum, but 0 in an empty row, where -inf - -inf would be nan."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)

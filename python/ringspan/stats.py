"""Statistics of the softmax that `attention` can return beside its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Stats(NamedTuple):
    """Row statistics, each [B, N, Sq_local], fp32 (fp64 for fp64 inputs).

    A row that keeps nothing has max -inf, sum 0 and lse -inf. Only `lse` carries a gradient.
    """

    max: Tensor
    sum: Tensor
    lse: Tensor

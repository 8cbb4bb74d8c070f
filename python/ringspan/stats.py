"""Statistics of the softmax that `attention` can return beside its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Stats(NamedTuple):
    """Row statistics, each [B, N, Sq_local] (layout TND: [T_local, N]), fp32 (fp64 for fp64 inputs).

    A row that keeps nothing has max -inf, sum 0 and lse -inf. Only `lse` carries a gradient.
    """

    max: Tensor
    sum: Tensor
    lse: Tensor

    @classmethod
    def of(cls, layout: str, *statistics: Tensor) -> Stats:
        """From [B, N, Sq_local] to the order of `layout`."""
        return cls(*(one[0].transpose(0, 1) if layout == "TND" else one for one in statistics))

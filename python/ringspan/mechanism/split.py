"""Splitting a sequence: every rank holds one run of positions.

Ten positions on two ranks:   0 1 2 3 4 | 5 6 7 8 9
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.mechanism.arguments import check_divides, check_size, check_tensor


def split_sequence_contiguous(tensor: Tensor, cp_size: int) -> list[Tensor]:
    """Cuts a sequence into `cp_size` runs of equal length, in order; rank r holds number r.

    tensor: [..., S, D], any dtype; S >= 1. cp_size: number of ranks (context parallel size), a divisor of S.
    Returns `cp_size` views [..., S / cp_size, D]; concatenated along axis -2 they are the tensor again.
    ValueError where S is 0 or no multiple of `cp_size`, where `cp_size` is no whole number >= 1, and for fewer than 2
    axes. No position is ever dropped or padded.
    """
    check_tensor("tensor", tensor)
    cp_size = check_size("cp_size", cp_size)
    sequence_length = tensor.shape[-2]
    if sequence_length == 0:
        raise ValueError(f"tensor has shape {list(tensor.shape)}: its sequence (axis -2) is empty; give >= 1 position")
    return list(torch.split(tensor, check_divides(cp_size, sequence_length), dim=-2))

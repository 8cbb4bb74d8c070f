"""What changes single pairs of query and key: boolean and float masks, a bias, ALiBi, a softcap, dropout.

The arguments of `attention` on the left, what crosses the dispatcher on the right:

    attn_mask (bool)           -> attn_mask
    attn_mask (float), bias    -> bias          their sum where both are given
    bias=alibi(slopes)         -> slopes, places[4]
    softcap                    -> softcap       0 = none
    dropout_p, seed, offset... -> dropout_p, seed, places
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringspan.call import Sizes
from ringspan.masks import Frame, corner_of
from ringspan.support import check_offered

_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Alibi:
    """A bias that falls with the distance: -slope * |j - i|."""

    slopes: Tensor = field(compare=False)
    align: str | None


def alibi(slopes: Tensor, align: str | None = None) -> Alibi:
    """The bias -slopes[n] * |j - i| of head n (ALiBi, Press, Smith, Lewis 2021), without a tensor of that size.

    slopes: [N] or [B, N], float32 (float64 with float64 tensors), without gradient. i and j are global positions; where
    queries and keys differ in number and no shard maps give positions, `align` says which corner they share, as for
    `causal`. ValueError for other slopes, NotImplementedError where slopes require a gradient.
    """
    if not isinstance(slopes, Tensor) or slopes.dim() not in (1, 2) or not slopes.is_floating_point():
        shown = f"{slopes.dtype} {list(slopes.shape)}" if isinstance(slopes, Tensor) else type(slopes).__name__
        raise ValueError(f"alibi(slopes={shown}): give a float32 tensor of one value per query head, [N] or [B, N]")
    check_offered("alibi", slopes.requires_grad)
    if align not in (None, "top_left", "bottom_right"):
        raise ValueError(f"alibi(align={align!r}): give 'top_left', 'bottom_right' or None")
    return Alibi(slopes, align)


@dataclass(frozen=True)
class PairChoices:
    """The arguments, as the caller gave them."""

    attn_mask: Tensor | None = None
    bias: Any = None
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: Tensor | int | None = None
    offset: int = 0
    head_offset: int = 0
    batch_offset: int = 0
    total_heads: int | None = None

    def check(self) -> None:
        """Raises ValueError for an argument that is wrong by itself."""
        for name, given in (("attn_mask", self.attn_mask), ("bias", self.bias)):
            if given is not None and not isinstance(given, Tensor | (Alibi if name == "bias" else Tensor)):
                what = "a tensor, alibi(slopes)" if name == "bias" else "a bool or float tensor"
                raise ValueError(f"{name} is of {type(given).__name__}; give {what} or None")
        if isinstance(self.bias, Tensor) and not self.bias.is_floating_point():
            raise ValueError(f"bias is of {self.bias.dtype}; give a float tensor (a bool mask goes to attn_mask)")
        if self.softcap is not None and not (_is_number(self.softcap) and 0 < self.softcap < math.inf):
            raise ValueError(f"softcap is {self.softcap!r}; give a finite number above 0, or None")
        if not _is_number(self.dropout_p) or not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p is {self.dropout_p!r}; give a probability, at least 0 and below 1")
        for name in ("offset", "head_offset", "batch_offset"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int | torch.SymInt) or given < 0:
                raise ValueError(f"{name} is {given!r}; give a whole number >= 0")
        self._check_seed()

    def _check_seed(self) -> None:
        seed = self.seed
        if isinstance(seed, Tensor):
            if seed.dtype != torch.int64 or seed.numel() != 1:
                raise ValueError(f"seed is {seed.dtype} {list(seed.shape)}; give one int64, an int or None")
        elif seed is not None and (
            isinstance(seed, bool)
            or not isinstance(seed, int | torch.SymInt)
            or not -_LARGEST_SEED - 1 <= seed <= _LARGEST_SEED
        ):
            raise ValueError(f"seed is {seed!r}; give an int of 64 bits, an int64 tensor of one element, or None")

    def encode(self, sizes: Sizes, frame: Frame, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of the op. `sizes`: of this rank's tensors; `frame`: global lengths.

        ValueError where a tensor does not fit them.
        """
        full = (sizes.batch, sizes.q_heads, sizes.q_rows, frame.kv_len)
        mask, bias, slopes, shift = None, None, None, 0
        for name, given in (("attn_mask", self.attn_mask), ("bias", self.bias)):
            if isinstance(given, Tensor):
                fitted = _fitted(name, given, full, dtype, device)
                if given.dtype == torch.bool:
                    mask = fitted
                else:
                    bias = fitted if bias is None else bias + fitted
        if isinstance(self.bias, Alibi):
            slopes = _fitted_slopes(self.bias.slopes, sizes, dtype, device)
            shift = 0 if corner_of("alibi", self.bias.align, frame) == 1 else frame.q_len - frame.kv_len
        total = self._total_heads(sizes) if self.dropout_p > 0 else sizes.q_heads
        drawn = self.dropout_p > 0 and self.seed is None
        return {
            "bias": bias,
            "attn_mask": mask,
            "slopes": slopes,
            "seed": self._seed_tensor(),
            "softcap": 0.0 if self.softcap is None else float(self.softcap),
            "dropout_p": float(self.dropout_p),
            "places": [self.offset, self.batch_offset, self.head_offset, total, shift, int(drawn)],
        }

    def _seed_tensor(self) -> Tensor | None:
        if self.dropout_p == 0:
            return None
        if self.seed is None:
            # By the default generator, in the graph: a compiled graph draws anew each time, and a checkpoint that keeps
            # the generator's state draws the same again.
            return torch.randint(_LARGEST_SEED, (1,), dtype=torch.int64)
        return self.seed.reshape(1) if isinstance(self.seed, Tensor) else torch.full((1,), self.seed, dtype=torch.int64)

    def _total_heads(self, sizes: Sizes) -> int:
        end = self.head_offset + sizes.q_heads
        if self.total_heads is None:
            # The first batch entry needs no total: its heads are counted from 0.
            if self.head_offset > 0 and (sizes.batch > 1 or self.batch_offset > 0):
                raise ValueError(
                    f"head_offset is {self.head_offset} and total_heads is not given; with {sizes.batch} batch entries "
                    f"from {self.batch_offset} on, say how many heads the undivided call has (total_heads=)"
                )
            return end
        if self.total_heads < end:
            raise ValueError(f"total_heads is {self.total_heads}, but this call's heads end at {end}")
        return self.total_heads


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fitted(name: str, given: Tensor, full: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`given` where it expands to `full`; shared columns are expanded here, so that their gradient is summed up."""
    wide = (torch.float32, torch.float64) if dtype == torch.float64 else (torch.float32, torch.bfloat16, torch.float16)
    if given.dtype != torch.bool and given.dtype not in wide:
        raise ValueError(f"{name} is of {given.dtype}; give {', '.join(str(one) for one in wide)}")
    if given.device != device:
        raise ValueError(f"{name} lies on {given.device}, query on {device}; put them on one device")
    shape = given.shape
    fits = 0 < len(shape) <= 4 and all(
        size in (1, want) for size, want in zip(shape, full[4 - len(shape) :], strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {list(shape)}, which does not expand to {list(full)}: batch, query heads, this rank's "
            "query rows, all key positions"
        )
    return given.expand(*shape[:-1], full[3]) if shape[-1] != full[3] else given


def _fitted_slopes(slopes: Tensor, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    if tuple(slopes.shape) not in ((sizes.q_heads,), (sizes.batch, sizes.q_heads)):
        raise ValueError(
            f"alibi slopes have shape {list(slopes.shape)}, but query has {sizes.q_heads} heads in {sizes.batch} batch "
            f"entries; give [{sizes.q_heads}] or [{sizes.batch}, {sizes.q_heads}]"
        )
    if slopes.dtype not in ((torch.float32, torch.float64) if dtype == torch.float64 else (torch.float32,)):
        raise ValueError(f"alibi slopes are of {slopes.dtype}; give torch.float32")
    if slopes.device != device:
        raise ValueError(f"alibi slopes lie on {slopes.device}, query on {device}; put them on one device")
    return slopes

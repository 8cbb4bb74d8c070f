"""Steps on Ascend NPUs: the fused-attention contract, version 3, its gradient, and the ring update.

Ops are looked up at each call, on the module `torch_npu` where it is imported and offers the name, else in
`torch.ops.npu`: whoever replaces one sees every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringspan.device.registry import Steps
from ringspan.device.rows import Partial, Place, merge, place_of
from ringspan.device.tiles import SparseMode, mask_parts, read_tiles, sparse_mode_of
from ringspan.names import STAT_SLOTS

_EMPTY = torch.finfo(torch.float32).max  # the contract's empty row: max -EMPTY, sum +EMPTY
_MASKED_ROWS_ARE_EMPTY = 2  # inner_precise


def op(name: str) -> Callable[..., Any]:
    """The op of this name, as it is at this moment."""
    found = getattr(sys.modules.get("torch_npu"), name, None)
    return getattr(torch.ops.npu, name) if found is None else found


def ring_merge(one: Partial, other: Partial) -> Partial:
    """`merge`, by the accelerator's ring update where there is one: [B, N, S, D] becomes [S, B, N*D] and back."""
    try:
        update = op("npu_ring_attention_update")
    except AttributeError:
        return merge(one, other)
    batch, heads, rows, dim = other.out.shape
    found = update(
        _to_sbh(one.out), *_to_contract(one.max, one.sum), _to_sbh(other.out), *_to_contract(other.max, other.sum),
        input_layout="SBH",
    )  # fmt: skip
    out = found[0].view(rows, batch, heads, dim).permute(1, 2, 0, 3)
    row_max, row_sum = found[1][..., 0], found[2][..., 0]
    empty = row_max <= -_EMPTY
    return Partial(out, row_max.masked_fill(empty, -torch.inf), row_sum.masked_fill(empty, 0.0))


def _arguments(mode: SparseMode) -> dict[str, Any]:
    if mode.atten_mask is None:
        return {}
    return {
        "atten_mask": mode.atten_mask,
        "sparse_mode": mode.sparse_mode,
        "pre_tockens": mode.pre_tockens,
        "next_tockens": mode.next_tockens,
        "inner_precise": _MASKED_ROWS_ARE_EMPTY,
    }


def _to_sbh(out: Tensor) -> Tensor:
    return out.permute(2, 0, 1, 3).flatten(2)


def _in_slots(statistic: Tensor) -> Tensor:
    return statistic.unsqueeze(-1).expand(*statistic.shape, STAT_SLOTS).contiguous()


def _to_contract(row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor]:
    empty = row_max == -torch.inf
    return _in_slots(row_max.masked_fill(empty, -_EMPTY)), _in_slots(row_sum.masked_fill(empty, _EMPTY))


class NpuSteps(Steps):
    """Over the contract's ops."""

    merge = staticmethod(ring_merge)

    def calls(self, tiles: Tensor, query: Tensor, value: Tensor) -> Iterator[tuple[Place, SparseMode]]:
        """See `Steps.calls`."""
        for tile in read_tiles(tiles):
            for part in [tile] if tile.band() is not None else mask_parts(tile):
                mode = sparse_mode_of(part, query.device)
                if mode is None:
                    continue
                if mode.sparse_mode == 1 and mode.atten_mask is not None:
                    place, keep = place_of(part, ~mode.atten_mask)
                    yield place, replace(mode, atten_mask=~keep)
                else:
                    yield Place(part), mode

    def attend(self, call: SparseMode, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """See `Steps.attend`."""
        attend = op("npu_fusion_attention_v3")
        found = attend(q, k, v, q.shape[1], "BNSD", scale=scale, **_arguments(call))
        return Partial(found[0].float(), found[1][..., 0], found[2][..., 0])

    def differentiate(
        self, call: SparseMode, rows: list[Tensor], k: Tensor, v: Tensor, scale: float
    ) -> Sequence[Tensor]:
        """See `Steps.differentiate`."""
        grad_out, q, out, lse = rows
        differentiate = op("npu_fusion_attention_grad_v3")
        # Merged statistics: exp(score - lse) / 1 is exp(score - max) / sum.
        return differentiate(
            q, k, v, grad_out, q.shape[1], "BNSD", softmax_max=_in_slots(lse),
            softmax_sum=_in_slots(torch.ones_like(lse)), softmax_in=q.new_empty(0), attention_in=out,
            scale_value=scale, **_arguments(call),
        )  # fmt: skip

"""Steps on Ascend NPUs: the fused-attention contract, version 3, its gradient, and the ring update.

Ops are looked up at each call, on the module `torch_npu` where it is imported and offers the name, else in
`torch.ops.npu`: whoever replaces one sees every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringspan.device.rows import Partial, Place, merge, place_of
from ringspan.device.tiles import SparseMode, mask_parts, read_tiles, sparse_mode_of
from ringspan.names import STAT_SLOTS

_EMPTY = torch.finfo(torch.float32).max  # the contract's empty row: max -EMPTY, sum +EMPTY
_MASKED_ROWS_ARE_EMPTY = 2  # inner_precise


class NpuSteps:
    """The kernels of `ringspan::_step_forward` and `_step_backward` over the contract's ops."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, scale: float, out: Tensor, row_max: Tensor,
        row_sum: Tensor,
    ) -> None:  # fmt: skip
        """Adds the tiles' attention to the state (out, row_max, row_sum), in place."""
        attend = op("npu_fusion_attention_v3")
        for place, mode in calls(tiles, query.device):
            q, k, v = place.rows(query), place.columns(key), place.columns(value)
            found = attend(q, k, v, q.shape[1], "BNSD", scale=scale, **_arguments(mode))
            part = Partial(found[0].float(), found[1][..., 0], found[2][..., 0])
            place.join(part, Partial(out, row_max, row_sum), ring_merge)

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, tiles: Tensor,
        scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        """Adds the tiles' gradients to dq, dk and dv, in place. out and lse are those of whole rows."""
        differentiate = op("npu_fusion_attention_grad_v3")
        for place, mode in calls(tiles, query.device):
            q, rows_lse = place.rows(query), place.rows(lse)
            # Merged statistics: exp(score - lse) / 1 is exp(score - max) / sum.
            found = differentiate(
                q, place.columns(key), place.columns(value), place.rows(grad_out), q.shape[1], "BNSD",
                softmax_max=_in_slots(rows_lse), softmax_sum=_in_slots(torch.ones_like(rows_lse)),
                softmax_in=q.new_empty(0), attention_in=place.rows(out), scale_value=scale, **_arguments(mode),
            )  # fmt: skip
            place.add_gradients(found, dq, dk, dv)


def op(name: str) -> Callable[..., Any]:
    """The op of this name, as it is at this moment."""
    found = getattr(sys.modules.get("torch_npu"), name, None)
    return getattr(torch.ops.npu, name) if found is None else found


def calls(tiles: Tensor, device: torch.device) -> Iterator[tuple[Place, SparseMode]]:
    """The calls that the tiles of a step need."""
    for tile in read_tiles(tiles):
        for part in [tile] if tile.band() is not None else mask_parts(tile):
            mode = sparse_mode_of(part, device)
            if mode is None:
                continue
            if mode.sparse_mode == 1 and mode.atten_mask is not None:
                place, keep = place_of(part, ~mode.atten_mask)
                yield place, replace(mode, atten_mask=~keep)
            else:
                yield Place(part), mode


def ring_merge(state: Partial, part: Partial) -> Partial:
    """`merge`, by the accelerator's ring update where there is one: [B, N, S, D] becomes [S, B, N*D] and back."""
    try:
        update = op("npu_ring_attention_update")
    except AttributeError:
        return merge(state, part)
    batch, heads, rows, dim = part.out.shape
    found = update(
        _to_sbh(state.out), *_to_contract(state.max, state.sum), _to_sbh(part.out), *_to_contract(part.max, part.sum),
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

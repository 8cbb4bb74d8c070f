"""Steps on CUDA GPUs: PyTorch's own flash and memory-efficient attention.

Flash knows full and square causal parts, and 16-bit inputs with equal head dims up to 256. Whatever else a step needs
goes to the memory-efficient op, with the pairs of a part written out as its bias. Both return the log-sum-exp of a
row and not its maximum: the state is (lse, 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.device.registry import Steps
from ringspan.device.rows import Partial, Place, place_of
from ringspan.device.tiles import flash_parts, mask_parts, read_tiles

_FLASH_HEAD_DIM = 256
_LSE_ALIGNMENT = 32  # rows to which the memory-efficient op fills up its log-sum-exp
_BIAS_ALIGNMENT = 16  # columns to which a bias is filled up in memory


@dataclass(frozen=True)
class CudaCall:
    """One call: by the flash op if `bias` is None and `by_flash`, else by the memory-efficient one."""

    by_flash: bool
    is_causal: bool = False
    bias: Tensor | None = None  # 0 or -inf, [rows, columns]


class CudaSteps(Steps):
    """Over aten's ops."""

    def calls(self, tiles: Tensor, query: Tensor, value: Tensor) -> Iterator[tuple[Place, CudaCall]]:
        """See `Steps.calls`."""
        fits_flash = query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_DIM
        for tile in read_tiles(tiles):
            parts = flash_parts(tile)
            if parts is not None:
                yield from ((Place(part), CudaCall(fits_flash, is_causal)) for part, is_causal in parts)
                continue
            for part in mask_parts(tile):
                place, keep = place_of(part, part.keep(query.device))
                if keep.shape[0] > 0:
                    yield place, CudaCall(False, bias=_bias(keep, query))

    def attend(self, call: CudaCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Partial:
        """See `Steps.attend`."""
        if call.by_flash:
            found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, call.is_causal, False, scale=scale)
        else:
            found = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, _heads(k, q), _heads(v, q), _expanded(call.bias, q), True, 0.0, call.is_causal, scale=scale
            )
        lse = found[1][:, :, : q.shape[2]]
        return Partial(found[0].float(), lse, torch.ones_like(lse))

    def differentiate(self, call: CudaCall, rows: list[Tensor], k: Tensor, v: Tensor, scale: float) -> Sequence[Tensor]:
        """See `Steps.differentiate`."""
        grad_out, q, out, lse = rows
        if call.by_flash:
            # Without dropout nobody reads the state of the random numbers.
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_out, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, call.is_causal,
                state, state[:0], scale=scale,
            )  # fmt: skip
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        rows_to_fill = -q.shape[2] % _LSE_ALIGNMENT
        filled = torch.nn.functional.pad(lse, (0, rows_to_fill), value=math.inf).contiguous()
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, _heads(k, q), _heads(v, q), _expanded(call.bias, q), out, filled, state, state, 0.0,
            [True, True, True, False], call.is_causal, scale=scale,
        )  # fmt: skip
        return dq, _sum_heads(dk, k), _sum_heads(dv, v)


def _bias(keep: Tensor, query: Tensor) -> Tensor:
    rows, columns = keep.shape
    wide = -(-columns // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias = query.new_full((rows, wide), -math.inf)
    bias[:, :columns].masked_fill_(keep, 0.0)
    return bias[:, :columns]


def _expanded(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(q.shape[0], q.shape[1], *bias.shape)


def _heads(kv: Tensor, q: Tensor) -> Tensor:
    """Each KV head as often as there are query heads that use it."""
    return kv if kv.shape[1] == q.shape[1] else kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _sum_heads(gradient: Tensor, kv: Tensor) -> Tensor:
    return gradient if gradient.shape[1] == kv.shape[1] else gradient.float().unflatten(1, (kv.shape[1], -1)).sum(2)

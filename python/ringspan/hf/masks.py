"""The mask function that transformers calls once for each kind of layer, and the object that it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ringspan.entry import Telling
from ringspan.hf.context import Forward, current_forward, group_here
from ringspan.hf.patterns import Pattern, read_pattern
from ringspan.masks import Mask, bands, causal, chunked, documents, full, window


@dataclass(frozen=True, eq=False)
class StructuredMask:
    """What a layer's attention keeps: `mask` and `keep`, both.

    keep: bool, expands to [B, 1, rows, all keys], True takes part. pattern: what `mask` was made of, None where `keep`
    says all. forward: the context-parallel forward that made it, None on one rank. first: the column of row 0, where a
    cache holds earlier keys. shape [B, 1, rows, keys] and ndim are what transformers asks of a mask made beforehand.
    """

    mask: Mask
    keep: Tensor | None
    pattern: Pattern | None
    shape: tuple[int, int, int, int]
    forward: Forward | None = None
    first: int = 0
    ndim: int = 4


@torch.compiler.disable
def make_mask(*args: Any, **kwargs: Any) -> StructuredMask:
    """The function registered in `AttentionMaskInterface`; its arguments are those of transformers, see `_make_mask`.

    Raises NotImplementedError under context parallelism for what cannot be said of the whole sequence.
    """
    with Telling(group_here()):
        return _make_mask(*args, **kwargs)


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor | int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Any = None,
    **others: Any,
) -> StructuredMask:
    """Row r is position q_offset + r, column c is position kv_offset + c. attention_mask: bool [B, positions], False is
    padding.
    """
    if isinstance(attention_mask, StructuredMask):
        return attention_mask
    shape = (batch_size, 1, q_length, kv_length)
    pattern = read_pattern(mask_function)
    forward = current_forward()
    if forward is not None:
        return _mask_of_shards(forward, shape, pattern, mask_function)
    q_offset = int(q_offset)
    mask = None if pattern is None else _mask_of(pattern, q_length, kv_length, q_offset, kv_offset)
    if mask is None:
        from transformers import masking_utils

        # Exact for every mask function, on one rank.
        dense = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=others.get("use_vmap", False),
            device=others.get("device", "cpu"),
        )
        return StructuredMask(full(), dense, None, shape)
    keep = _padding(attention_mask, kv_length, kv_offset)
    return StructuredMask(mask, keep, pattern, shape, first=q_offset - kv_offset)


def _mask_of_shards(
    forward: Forward, shape: tuple[int, int, int, int], pattern: Pattern | None, mask_function: Callable | None
) -> StructuredMask:
    """The mask of the whole sequence. What was read from this rank's tokens alone, is replaced by what was gathered."""
    _, _, rows, keys = shape
    if pattern is None:
        name = getattr(mask_function, "__qualname__", mask_function)
        raise NotImplementedError(
            f"the mask function {name} is none that ringspan.hf can say of a sequence on several ranks; run this model "
            "on one rank"
        )
    if rows != forward.rows or keys != rows:
        raise NotImplementedError(
            f"attention of {rows} queries over {keys} keys on a rank that holds {forward.rows} tokens: caches and "
            "cross attention are not offered under context parallelism; run them on one rank"
        )
    if pattern.chunk is not None:
        pattern = replace(pattern, chunk=(pattern.chunk[0], _no_left_padding(forward)))
    pattern = replace(pattern, documents=None, positions=None)
    length = forward.shard_map.seq_len
    mask = _mask_of(pattern, length, length, 0, 0, forward.documents)
    if mask is None:
        raise NotImplementedError(f"a mask of {pattern} is not offered under context parallelism")
    keep = None if forward.padding is None else forward.padding[:, None, None, :]
    return StructuredMask(mask, keep, pattern, shape, forward)


def _no_left_padding(forward: Forward) -> Tensor:
    if forward.padding is not None and not bool(forward.padding[:, 0].all()):
        raise NotImplementedError("chunked attention with padding on the left is not offered under context parallelism")
    if forward.documents is not None and not forward.counts_from_zero:
        raise NotImplementedError("chunked attention in documents whose position_ids do not begin at 0 is not offered")
    return torch.zeros(1, dtype=torch.int64)


def _mask_of(
    pattern: Pattern, q_len: int, kv_len: int, q_offset: int, kv_offset: int, lengths: Tensor | None = None
) -> Mask | None:
    """A pattern as a mask of rows and columns; None where only a dense tensor says it. `lengths`: of documents.

    Row r is position q_offset + r and column c position kv_offset + c, so low <= j - i <= high becomes
    low + shift <= c - r <= high + shift.
    """
    shift = q_offset - kv_offset
    packed = pattern.documents is not None or lengths is not None
    if (packed or pattern.chunk is not None) and (shift != 0 or kv_offset != 0 or q_len != kv_len):
        return None
    if not packed and shift != 0:
        open_or = [None if side is None else side + shift for side in (pattern.low, pattern.high)]
        return bands([(0, q_len, 0, kv_len, *open_or)])
    rule = _rule(pattern, None if q_len == kv_len else "top_left")
    if rule is None or not packed:
        return rule
    if lengths is not None:
        return documents(lengths=lengths, inside=rule)
    return None if pattern.documents is None else documents(ids=pattern.documents + 1, inside=rule)


def _rule(pattern: Pattern, align: str | None) -> Mask | None:
    low, high = pattern.low, pattern.high
    if pattern.chunk is not None:
        size, left_padding = pattern.chunk
        whole = (low, high) == (None, 0) and not bool(left_padding.any()) and _documents_count_from_zero(pattern)
        return chunked(size, align) if whole else None
    if high is None and low is None:
        return full()
    if high == 0 and low is None:
        return causal(align)
    if (low or 0) > 0 or (high or 0) < 0:
        return None
    return window(None if low is None else -low, high, align)


def _documents_count_from_zero(pattern: Pattern) -> bool:
    if pattern.documents is None or pattern.positions is None:
        return pattern.documents is None
    begins = torch.ones_like(pattern.documents, dtype=torch.bool)
    begins[:, 1:] = pattern.documents.diff(dim=1) != 0
    return not bool(pattern.positions.expand_as(begins)[begins].any())


def _padding(attention_mask: Tensor | None, kv_len: int, kv_offset: int) -> Tensor | None:
    """[B, 1, 1, kv_len], or None where no key is padding. Keys beyond the mask (of a static cache) are none yet."""
    if attention_mask is None:
        return None
    keep = torch.nn.functional.pad(attention_mask, (0, max(0, kv_offset + kv_len - attention_mask.shape[-1])))
    keep = keep[:, None, None, kv_offset : kv_offset + kv_len]
    return None if bool(keep.all()) else keep

"""The attention function that transformers' models call in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringspan.attention import attention
from ringspan.entry import Telling
from ringspan.group import LOCAL
from ringspan.hf.context import current_forward, group_here
from ringspan.hf.masks import StructuredMask
from ringspan.hf.patterns import Pattern
from ringspan.masks import causal, documents, full

# What models hand on to attention and what changes nothing in it: sizes that the tensors have too, choices of other
# implementations, and arguments of other parts of the model.
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
    }
)


@torch.compiler.disable
def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The function registered in `AttentionInterface`; its arguments are those of transformers, see `_attend`.

    Raises ValueError where arguments contradict each other and NotImplementedError, by name, for those that are not
    known; on every rank.
    """
    masks = (one for one in (*args, *kwargs.values()) if isinstance(one, StructuredMask))
    forward = next((mask.forward for mask in masks), None)
    with Telling(group_here() if forward is None else forward.group):
        return _attend(*args, **kwargs)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, N, Sq, D], key and value [B, Nkv, Skv, D]; attention_mask: a `StructuredMask`, a tensor [B, 1 or N, Sq,
    Skv] (bool: True takes part; float: added) or None. Returns [B, Sq, N, D] and no weights.
    """
    forward = attention_mask.forward if isinstance(attention_mask, StructuredMask) else None
    _check_unknown(others)
    found = _structured(module, attention_mask, query, key, sliding_window, is_causal)
    _check_sizes(found, query, key)
    _check_causal(found.pattern, is_causal)
    _check_window(found, key.shape[2], sliding_window)
    if forward is not None and position_bias is not None:
        raise NotImplementedError("position_bias is not offered under context parallelism; run it on one rank")
    found = _with_documents(found, query.shape[2], others)
    if forward is not None:
        forward.calls += 1
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out: Any = attention(
        query,
        key,
        value,
        mask=found.mask,
        attn_mask=found.keep,
        shard_map=None if forward is None else forward.shard_map,
        group=LOCAL if forward is None else forward.group,
        scale=scaling,
        softcap=softcap,
        sink=None if s_aux is None else s_aux.to(wide),
        bias=position_bias,
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _check_unknown(others: dict[str, Any]) -> None:
    if others.get("output_attentions"):
        raise NotImplementedError('output_attentions: ringspan makes no weights; use attn_implementation="eager"')
    known = HARMLESS | {"output_attentions", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"}
    unknown = sorted(name for name, value in others.items() if name not in known and value is not None)
    if unknown:
        raise NotImplementedError(
            f"the model gives attention {', '.join(unknown)}, which ringspan.hf does not know and so cannot leave out; "
            'use attn_implementation="eager"'
        )


def _structured(
    module: torch.nn.Module,
    given: Any,
    query: Tensor,
    key: Tensor,
    sliding_window: int | None,
    is_causal: bool | None,
) -> StructuredMask:
    """Any mask of transformers as a `StructuredMask`."""
    if isinstance(given, StructuredMask) and given.forward is not None:
        return given
    if current_forward() is not None:
        raise NotImplementedError(
            f"a layer under context_parallel got attention_mask={type(given).__name__} that was not made for this "
            "forward; leave the mask to the model, or run it on one rank"
        )
    if isinstance(given, StructuredMask):
        return given
    rows, keys = query.shape[2], key.shape[2]
    shape = (query.shape[0], 1, rows, keys)
    if isinstance(given, Tensor):
        if given.dim() != 4:
            raise ValueError(f"attention_mask has shape {list(given.shape)} in a layer; give [B, 1 or N, Sq, Skv]")
        return StructuredMask(full(), given, None, shape)
    if given is not None:
        raise NotImplementedError(f"attention_mask is of {type(given).__name__}; give a tensor or None")
    if sliding_window is not None and sliding_window < keys:
        raise NotImplementedError(
            f"sliding_window={sliding_window} in a layer without a mask, which would say its sides"
        )
    causal_layer = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal_layer is None:
        raise ValueError(f"{type(module).__name__} has no mask and does not say is_causal; give it one of them")
    if not causal_layer or rows == 1:
        return StructuredMask(full(), None, Pattern(), shape)
    if rows != keys:
        raise ValueError(f"a causal layer without a mask has {rows} queries and {keys} keys; give a mask")
    return StructuredMask(causal(), None, Pattern(high=0), shape)


def _check_sizes(found: StructuredMask, query: Tensor, key: Tensor) -> None:
    rows, keys = found.shape[2:]
    if (query.shape[2], key.shape[2]) != (rows, keys):
        raise ValueError(
            f"the mask was made for {rows} queries and {keys} keys, but the layer has {query.shape[2]} and "
            f"{key.shape[2]}; layers of one kind must hold equally long caches"
        )


def _check_causal(pattern: Pattern | None, is_causal: bool | None) -> None:
    """What a module says by itself is left aside: its config may have made the mask bidirectional."""
    if pattern is not None and is_causal is not None and is_causal != (pattern.high == 0):
        raise _contradiction(f"is_causal={is_causal}", pattern)


def _check_window(found: StructuredMask, keys: int, sliding_window: int | None) -> None:
    """A window counts the query itself or, in models for both sides, one more than each side."""
    pattern = found.pattern
    keys = keys if found.forward is None else found.forward.shard_map.seq_len
    if sliding_window is None or pattern is None or sliding_window >= keys:
        return
    if pattern.low != 1 - sliding_window:
        raise _contradiction(f"sliding_window={sliding_window}", pattern)


def _contradiction(given: str, pattern: Pattern) -> ValueError:
    kept = f"low <= j - i <= high for (low, high) = ({pattern.low}, {pattern.high})"
    return ValueError(f"{given}, but the mask keeps {kept}")


def _with_documents(found: StructuredMask, rows: int, others: dict[str, Any]) -> StructuredMask:
    """Adds the documents that cu_seq_lens_q and cu_seq_lens_k tell; refuses packing that nothing tells the mask."""
    given = [others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if given == [None, None]:
        if found.pattern is not None and found.pattern.documents is None and found.forward is None:
            _check_not_packed(found, rows, others.get("position_ids"))
        return found
    if found.forward is not None:
        raise NotImplementedError("cu_seq_lens_q and cu_seq_lens_k: give context_parallel(documents=lengths) instead")
    lengths = _lengths_of(given, found.shape)
    pattern = found.pattern
    if pattern is not None and pattern.documents is not None:
        of_positions = torch.unique_consecutive(pattern.documents[0], return_counts=True)[1]
        if not torch.equal(of_positions, lengths):
            raise ValueError(
                f"cu_seq_lens_q tells documents of {lengths.tolist()} tokens, position_ids of {of_positions.tolist()}"
            )
        return found
    mask = found.mask & documents(lengths=lengths, inside=full())
    return StructuredMask(mask, found.keep, pattern, found.shape)


def _lengths_of(given: list[Tensor | None], shape: tuple[int, int, int, int]) -> Tensor:
    of_queries, of_keys = given
    if of_queries is None or of_keys is None or not torch.equal(of_queries, of_keys):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ; self-attention of packed documents needs them alike")
    batch, _, rows, keys = shape
    lengths = of_queries.diff()
    fits = batch == 1 and rows == keys and int(of_queries[0]) == 0 and int(of_queries[-1]) == rows
    if not fits or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seq_lens_q is {of_queries.tolist()} for {batch} batch entries of {rows} queries and {keys} keys; it "
            "must rise from 0 to the length of the one entry"
        )
    return lengths[lengths > 0].to(torch.int64)


def _check_not_packed(found: StructuredMask, rows: int, position_ids: Any) -> None:
    """Documents of which only position_ids tell would be merged. Beside padding, other tokens' jumps count alone."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != rows or rows == 1:
        return
    jumps = position_ids.diff(dim=1) != 1
    if found.keep is not None:
        valid = found.keep[:, 0, 0, found.first : found.first + rows]
        jumps = jumps & valid[:, 1:] & valid[:, :-1]
    if bool(jumps.any()):
        entry, place = (int(index) for index in jumps.nonzero()[0])
        raise ValueError(
            f"position_ids jump after token {place} of entry {entry}, but the mask knows no documents: beside an "
            "attention_mask or a cache, and in some models always, transformers merges them. Leave attention_mask out "
            "and give use_cache=False, or tell them by cu_seq_lens_q and cu_seq_lens_k"
        )

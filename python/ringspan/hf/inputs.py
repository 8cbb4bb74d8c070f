"""What a model is called with under context parallelism: checked, and gathered where all ranks have to know it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ringspan.group import Group
from ringspan.shard_map import ShardMap

# Besides these a model may be called only with None and False: what is not known is not dropped.
_OFFERED = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "token_type_ids"}
_OFFERED |= {"output_hidden_states", "return_dict"}
_LABELS = (
    "losses are means over this rank's tokens, shifted inside of its shard; shift and shard the labels yourself and "
    "use ringspan.masked_mean_loss"
)
_INSTEAD = {
    "labels": _LABELS,
    "shift_labels": _LABELS,
    "cu_seq_lens_q": "give context_parallel(documents=lengths)",
    "cu_seq_lens_k": "give context_parallel(documents=lengths)",
    "cache": "a cache holds this rank's keys only; generate on one rank",
    "past_key_values": "a cache holds this rank's keys only; generate on one rank",
    "use_cache": "a cache holds this rank's keys only; generate on one rank",
}


def check_call(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], rows: int, documents: Tensor | None
) -> tuple[tuple, dict[str, Any], Tensor]:
    """The arguments of a call, with no cache and a mask, and what is to be gathered of them: int64 [2, B, S], positions
    and which of the rows are no padding.

    Without a 2-D mask transformers would look for packed documents in this rank's positions.

    Raises ValueError for shapes that do not fit `rows`, NotImplementedError for arguments that are not offered.
    """
    names = list(inspect.signature(model.forward).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    for name, value in given.items():
        if name not in _OFFERED and value is not None and value is not False:
            raise NotImplementedError(
                f"{name} is not offered under context parallelism: "
                f"{_INSTEAD.get(name, 'what it means for one rank is not known; leave it out')}"
            )
    if "use_cache" in names and "use_cache" not in given:
        kwargs = {**kwargs, "use_cache": False}
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.shape[1] != rows:
        shown = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"input_ids or inputs_embeds is {shown}; give [B, {rows}, ...], this rank's rows of the map")
    batch = tokens.shape[0]
    if documents is not None and documents.shape[0] not in (1, batch):
        raise ValueError(f"documents has lengths of {documents.shape[0]} entries, but the batch has {batch}")
    positions = _checked(given, "position_ids", batch, rows)
    if positions is None:
        raise ValueError(
            "position_ids are missing; every rank would count from 0. Give those of the whole sequence, "
            "shard_map.positions(rank)[None]"
        )
    valid = _checked(given, "attention_mask", batch, rows)
    if valid is not None and bool(((valid != 0) & (valid != 1)).any()):
        raise ValueError(
            "attention_mask holds other numbers than 0 and 1; for packed documents give context_parallel(documents=...)"
        )
    if valid is None:
        valid = torch.ones(batch, rows, dtype=torch.int64)
        place = names.index("attention_mask") if "attention_mask" in names else len(args)
        if place < len(args):
            args = (*args[:place], valid, *args[place + 1 :])
        else:
            kwargs = {**kwargs, "attention_mask": valid}
    return args, kwargs, torch.stack([positions.to(torch.int64), valid.to(torch.int64)])


def gather(local: Tensor, shard_map: ShardMap, group: Group, documents: Tensor | None) -> tuple[Tensor | None, bool]:
    """Padding of the whole sequence, and whether positions count from 0. A collective; all ranks raise the same.

    Padding: bool [B, whole sequence], False is padding, None where there is none. local: from `check_call`.

    ValueError where the positions are not those of the sequence or of its documents, up to one number for each entry.
    """
    positions, valid = shard_map.unshard(local, group=group, dim=2, batch_dim=1)
    valid = valid.bool()
    expected, counted = _expected(shard_map.seq_len, documents)
    counted = counted & valid
    ahead = positions - expected
    first = ahead.gather(1, counted.to(torch.int64).argmax(dim=1, keepdim=True))
    wrong = (counted & (ahead != first)).nonzero()
    if wrong.numel():
        entry, place = wrong[0].tolist()
        raise ValueError(
            f"position_ids of entry {entry} hold {int(positions[entry, place])} at position {place}, where "
            f"{int(expected.expand_as(positions)[entry, place] + first[entry, 0])} comes next; give "
            "shard_map.positions(rank)[None], or, for packed documents, their lengths as "
            "context_parallel(documents=...) and positions counted in each"
        )
    from_zero = not bool((counted & (ahead != 0)).any())
    return None if bool(valid.all()) else valid, from_zero


def _checked(given: dict[str, Any], name: str, batch: int, rows: int) -> Tensor | None:
    """A tensor expanded to [batch, rows]."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[0] not in (1, batch) or value.shape[1] != rows:
        shown = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {shown}; give [{batch}, {rows}], of this rank's rows of the map")
    return value.expand(batch, rows)


def _expected(seq_len: int, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """int64 [1 or B, seq_len], and bool, likewise: which of them lie in a document.

    lengths 3 2 of 7    0 1 2 | 0 1 | . .
    """
    places = torch.arange(seq_len)[None]
    if documents is None:
        return places, torch.ones_like(places, dtype=torch.bool)
    ends = documents.cumsum(dim=1)
    owner = torch.searchsorted(ends, places.expand(ends.shape[0], -1).contiguous(), right=True)
    begins = torch.nn.functional.pad(ends, (1, 0)).gather(1, owner)
    return places - begins, owner < ends.shape[1]

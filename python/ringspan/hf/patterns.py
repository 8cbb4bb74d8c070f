"""What a mask function of transformers keeps, read from the functions that it is made of.

transformers builds a mask as a tree of closures. Each is known by the code of its factory:

    and_masks(causal_mask_function, sliding_window_overlay(4))      keeps -3 <= j - i <= 0

    and_mask(...)
      +- causal_mask_function             j - i <= 0
      +- inner_mask, sliding_window=4     j - i >= -3

A function that is not known makes the whole pattern unknown: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import getclosurevars
from types import CodeType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """Pairs with low <= j - i <= high (None is open), in one chunk, and in one document.

    chunk: (size, left padding of each batch entry). documents: [B, S], one number for each document. positions:
    [B, S], by which i and j are counted where documents are packed.
    """

    low: int | None = None
    high: int | None = None
    chunk: tuple[int, Tensor] | None = None
    documents: Tensor | None = None
    positions: Tensor | None = None


@cache
def known_factories() -> dict[CodeType, str]:
    """The code of each mask function that is understood, with the name of the rule that reads it.

    NotImplementedError where this version of transformers has none such.
    """
    from transformers import __version__, masking_utils

    one = torch.zeros(1, 1, dtype=torch.int64)
    try:
        made = {
            "causal": masking_utils.causal_mask_function,
            "full": masking_utils.bidirectional_mask_function,
            "and": masking_utils.and_masks(masking_utils.causal_mask_function),
            "window": masking_utils.sliding_window_overlay(1),
            "both_sides": masking_utils.sliding_window_bidirectional_overlay(1),
            "chunk": masking_utils.chunked_overlay(1, one),
            "documents": masking_utils.packed_sequence_mask_function(one),
            "positions": masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, one),
        }
    except (AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"transformers {__version__} makes masks in a way that ringspan.hf does not know ({error}); install the "
            "version that docs/transformers.md names"
        ) from None
    return {function.__code__: name for name, function in made.items()}


def read_pattern(function: Callable | None) -> Pattern | None:
    """The pattern of a mask function, None where a part of it is unknown."""
    code = getattr(function, "__code__", None)
    rule = None if code is None else known_factories().get(code)
    return None if function is None or rule is None else _RULES[rule](getclosurevars(function).nonlocals)


def _read_and(held: Mapping[str, Any]) -> Pattern | None:
    joined: Pattern | None = Pattern()
    for function in held["mask_functions"]:
        part = read_pattern(function)
        joined = None if part is None or joined is None else _intersect(joined, part)
    return joined


def _read_positions(held: Mapping[str, Any]) -> Pattern | None:
    inner = read_pattern(held["mask_function"])
    if inner is None or inner.documents is not None or inner.positions is not None:
        return None
    return Pattern(inner.low, inner.high, inner.chunk, None, held["position_ids"])


def _intersect(first: Pattern, second: Pattern) -> Pattern | None:
    """None where both restrict what cannot be joined: two chunk sizes, two sets of documents."""
    low = max((side for side in (first.low, second.low) if side is not None), default=None)
    high = min((side for side in (first.high, second.high) if side is not None), default=None)
    joined = []
    for name in ("chunk", "documents", "positions"):
        one, other = getattr(first, name), getattr(second, name)
        if one is not None and other is not None:
            return None
        joined.append(other if one is None else one)
    return Pattern(low, high, *joined)


_RULES: dict[str, Callable[[Mapping[str, Any]], Pattern | None]] = {
    "causal": lambda held: Pattern(high=0),
    "full": lambda held: Pattern(),
    "and": _read_and,
    "window": lambda held: Pattern(low=1 - held["sliding_window"]),
    "both_sides": lambda held: Pattern(low=-held["sliding_window"], high=held["sliding_window"]),
    "chunk": lambda held: Pattern(chunk=(held["chunk_size"], held["left_padding"])),
    "documents": lambda held: Pattern(documents=held["packed_sequence_mask"]),
    "positions": _read_positions,
}

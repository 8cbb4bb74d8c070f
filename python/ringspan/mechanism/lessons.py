"""What the exercise is checked with: small cases for each function, and the mistakes that people make.

A case is a call; the functions of this package say what its answer is. A mistake is a way to write the function wrong,
kept as a function: where a learner's answer is wrong in just that way, its hint fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan import mechanism
from ringspan.mechanism import mistakes

INF = float("inf")


@dataclass(frozen=True)
class Case:
    """One call: what it shows, its arguments, and the hint where the answer is wrong in no known way."""

    shows: str
    arguments: dict[str, Any]
    hint: str = ""


@dataclass(frozen=True)
class Lesson:
    """One function of the exercise: its right version, cases from small to large, known mistakes, a last hint."""

    name: str
    right: Callable[..., Any]
    cases: tuple[Case, ...]
    mistakes: tuple[mistakes.Mistake, ...]
    hint: str


def _column(*numbers: float) -> Tensor:
    return torch.tensor([float(number) for number in numbers]).unsqueeze(-1)


def _counted(*shape: int) -> Tensor:
    """Every element has a value of its own."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def _part(scores: list[float], values: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    return mechanism.local_softmax_statistics(torch.tensor([scores]), _column(*values))


EMPTY = _part([-INF], [1.0])

SPLIT = Lesson(
    "split_sequence_contiguous",
    mechanism.split_sequence_contiguous,
    (
        Case("two positions on two ranks", {"tensor": _column(10, 11), "cp_size": 2}),
        Case("six positions on two ranks", {"tensor": _column(10, 11, 12, 13, 14, 15), "cp_size": 2}),
        Case("one rank holds everything", {"tensor": _column(10, 11, 12), "cp_size": 1}),
        Case("batch and features stay whole", {"tensor": _counted(2, 3, 2), "cp_size": 3}),
        Case(
            "three positions on two ranks cannot be equal parts",
            {"tensor": _column(10, 11, 12), "cp_size": 2},
            "Where the parts cannot be equal, this function should refuse and not repair.",
        ),
        Case("no ranks at all", {"tensor": _column(10, 11), "cp_size": 0}, "Which numbers of ranks make no sense?"),
    ),
    mistakes.SPLIT,
    "Write down, for each rank, the first position that it holds and the first that it no longer holds.",
)

LOCAL = Lesson(
    "local_softmax_statistics",
    mechanism.local_softmax_statistics,
    (
        Case("one query, one key", {"scores": torch.tensor([[2.0]]), "value_shard": _column(3)}),
        Case("one query, two keys", {"scores": torch.tensor([[1.0, 2.0]]), "value_shard": _column(3, 5)}),
        Case(
            "two queries with scores of very different size",
            {"scores": torch.tensor([[1.0, 2.0], [60.0, 61.0]]), "value_shard": _column(3, 5)},
        ),
        Case(
            "scores in the thousands",
            {"scores": torch.tensor([[3000.0, 2999.0]]), "value_shard": _column(3, 5)},
            "What is the largest number whose exponential still fits into a float? What could you take off first?",
        ),
        Case("a masked key", {"scores": torch.tensor([[1.0, -INF]]), "value_shard": _column(3, 5)}),
        Case(
            "a query that sees no key",
            {"scores": torch.tensor([[-INF, -INF]]), "value_shard": _column(3, 5)},
            "Nothing was seen, so nothing is added up. Which of your steps makes something else of it?",
        ),
        Case("batch axes", {"scores": _counted(2, 3, 2), "value_shard": _counted(2, 2, 4)}),
    ),
    mistakes.LOCAL,
    "Take one query and two keys, work out the three numbers on paper, and print yours step by step.",
)

MERGE = Lesson(
    "merge_softmax_statistics",
    mechanism.merge_softmax_statistics,
    (
        Case("the first part", {"running": None, "local": _part([1.0], [3.0])}, "Before the first part there is None."),
        Case("equal largest scores", {"running": _part([1.0], [3.0]), "local": _part([1.0], [5.0])}),
        Case("the new part has the larger score", {"running": _part([0.0, 1.0], [3, 4]), "local": _part([2.0], [5.0])}),
        Case("the old part has the larger score", {"running": _part([2.0], [5.0]), "local": _part([0.0, 1.0], [3, 4])}),
        Case(
            "scores that lie very far apart",
            {"running": _part([2000.0], [3.0]), "local": _part([-2000.0], [5.0])},
            "Are all your exponents at most 0?",
        ),
        Case("so far no key was seen", {"running": EMPTY, "local": _part([1.0], [3.0])}),
        Case("the new part has no key to be seen", {"running": _part([1.0], [3.0]), "local": EMPTY}),
        Case("neither side has seen a key", {"running": EMPTY, "local": EMPTY}),
    ),
    mistakes.MERGE,
    "Each side counts in a unit of its own: relative to its own largest score. What is the unit of the result?",
)


_SIZES = ("sequence_length", "hidden_size", "dtype_bytes", "cp_size")


def _sizes(*sizes: int) -> dict[str, int]:
    return dict(zip(_SIZES, sizes, strict=True))


LEDGER = Lesson(
    "estimate_ring_kv_communication",
    mechanism.estimate_ring_kv_communication,
    (
        Case("one rank has nobody to send to", _sizes(3, 5, 4, 1)),
        Case("two ranks", _sizes(6, 5, 4, 2)),
        Case("four ranks", _sizes(12, 5, 4, 4)),
        Case("a usual size", _sizes(8192, 1024, 2, 8)),
        Case("three positions on two ranks", _sizes(3, 5, 4, 2), "Is there such a split?"),
        *(Case(f"{name} is 0", {**_sizes(6, 5, 4, 2), name: 0}, f"Can {name} be 0?") for name in _SIZES),
    ),
    mistakes.LEDGER,
    "Draw three ranks in a circle and follow the keys of one of them: who receives them, and when does it stop?",
)

LESSONS = (SPLIT, LOCAL, MERGE, LEDGER)

"""Ways to write the functions of the exercise wrong, each with the hint that leads away from it.

These are wrong on purpose: a learner's answer is compared with theirs. A hint asks or points, and gives no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.mechanism.arguments import Statistics


@dataclass(frozen=True)
class Mistake:
    """A wrong version of a function, and its hint."""

    wrong: Callable[..., Any]
    hint: str


def _drop_tail(tensor: Tensor, cp_size: int) -> list[Tensor]:
    length = tensor.shape[-2] // cp_size
    return [tensor[..., rank * length : (rank + 1) * length, :] for rank in range(cp_size)]


_UNEQUAL = "The parts are not equal here. Uneven parts are possible, but the ledger and the task want equal ones."

SPLIT = (
    Mistake(_drop_tail, "Count the positions in all your parts. Some position of the sequence is on no rank any more."),
    Mistake(lambda tensor, cp_size: list(torch.tensor_split(tensor, cp_size, dim=-2)), _UNEQUAL),
    Mistake(lambda tensor, cp_size: list(torch.chunk(tensor, cp_size, dim=-2)), _UNEQUAL),
    Mistake(
        lambda tensor, cp_size: [tensor[..., rank::cp_size, :] for rank in range(cp_size)],
        "Your ranks take turns, like dealing cards. Here each rank wants neighbours.",
    ),
    Mistake(
        lambda tensor, cp_size: list(torch.split(tensor, cp_size, dim=-2)),
        "Is cp_size the number of parts, or the length of one?",
    ),
    Mistake(
        lambda tensor, cp_size: list(torch.tensor_split(tensor, cp_size, dim=0)),
        "The first axis is not always the sequence. Count axes from the end.",
    ),
    Mistake(
        lambda tensor, cp_size: list(torch.tensor_split(tensor, cp_size, dim=-1)),
        "You have split the features. The sequence is the axis before them.",
    ),
)


def _local(scores: Tensor, value_shard: Tensor, base: Tensor) -> Statistics:
    weights = torch.exp(scores - base)
    return base, weights.sum(-1, keepdim=True), weights @ value_shard


def _row_max(scores: Tensor) -> Tensor:
    return scores.max(-1, keepdim=True).values


def _divided(statistics: Statistics) -> Statistics:
    maximum, denominator, numerator = statistics
    return maximum, denominator, numerator / denominator


def _normalised_twice(scores: Tensor, value_shard: Tensor) -> Statistics:
    maximum, denominator, numerator = _divided(_local(scores, value_shard, _row_max(scores)))
    return maximum, torch.ones_like(denominator), numerator


def _no_max(scores: Tensor, value_shard: Tensor) -> Statistics:
    return _row_max(scores), *_local(scores, value_shard, torch.zeros_like(_row_max(scores)))[1:]


def _flat(scores: Tensor, value_shard: Tensor) -> Statistics:
    maximum, denominator, numerator = _local(scores, value_shard, _row_max(scores))
    return maximum.squeeze(-1), denominator.squeeze(-1), numerator


_DIVIDED = "Your weighted sum has been divided already. How could a part that comes later be added to it?"
_RAW = "The exponentials are not taken relative to the largest score. Try a score of 1000."
_ONE_MAX = "You take one largest score for everything. Does every query have the same?"

LOCAL = (
    Mistake(lambda scores, value_shard: _divided(_local(scores, value_shard, _row_max(scores))), _DIVIDED),
    Mistake(_normalised_twice, _DIVIDED),
    Mistake(_no_max, _RAW),
    Mistake(lambda scores, value_shard: _local(scores, value_shard, torch.zeros_like(_row_max(scores))), _RAW),
    Mistake(lambda scores, value_shard: _local(scores, value_shard, scores.max()), _ONE_MAX),
    Mistake(
        lambda scores, value_shard: _local(scores, value_shard, scores.max().expand(_row_max(scores).shape)), _ONE_MAX
    ),
    Mistake(_flat, "The numbers are right, but an axis is gone. Keep the axis of the keys, with one entry."),
    Mistake(
        lambda scores, value_shard: _local(scores, value_shard, _row_max(scores)),
        "What is -inf minus -inf? Give a query without keys something harmless to subtract.",
    ),
)


def _merge(running: Statistics, local: Statistics, old_scale: Any = None, new_scale: Any = None) -> Statistics:
    """The right rule, unless another scale is given for a side; nan where both sides are empty."""
    maximum = torch.maximum(running[0], local[0])
    old = torch.exp(running[0] - maximum) if old_scale is None else old_scale
    new = torch.exp(local[0] - maximum) if new_scale is None else new_scale
    return maximum, running[1] * old + local[1] * new, running[2] * old + local[2] * new


def _average(running: Statistics, local: Statistics) -> Statistics:
    outputs = (running[2] / running[1] + local[2] / local[1]) / 2
    return torch.maximum(running[0], local[0]), torch.ones_like(running[1]), outputs


def _average_sums(running: Statistics, local: Statistics) -> Statistics:
    maximum, denominator, numerator = _merge(running, local, 1.0, 1.0)
    return maximum, denominator / 2, numerator / 2


def _upside_down(running: Statistics, local: Statistics) -> Statistics:
    maximum = torch.maximum(running[0], local[0])
    return _merge(running, local, torch.exp(maximum - running[0]), torch.exp(maximum - local[0]))


_AVERAGED = "You average the two parts. Should a part whose scores are tiny have as much say as one whose are large?"
_ONE_SIDE = (
    "Only one side is brought to the common largest score. Which side has the larger one changes from call to call."
)

MERGE = (
    Mistake(_average, _AVERAGED),
    Mistake(_average_sums, _AVERAGED),
    Mistake(
        lambda running, local: _merge(running, local, 1.0, 1.0),
        "You add the sums as they are. Both are relative to a largest score, but not to the same one.",
    ),
    Mistake(_upside_down, "Your factors are turned around: a part with lower scores must become smaller, not larger."),
    Mistake(lambda running, local: _merge(running, local, new_scale=1.0), _ONE_SIDE),
    Mistake(lambda running, local: _merge(running, local, old_scale=1.0), _ONE_SIDE),
    Mistake(
        lambda running, local: _divided(_merge(running, local)),
        "You have divided already. Can this result be merged with one more part?",
    ),
    Mistake(
        lambda running, local: (running[0] + local[0], *_merge(running, local)[1:]),
        "Sums are added; is the largest score of both parts a sum?",
    ),
    Mistake(lambda running, local: running, "The part that has just arrived leaves no trace."),
    Mistake(lambda running, local: local, "What had been seen before is forgotten."),
    Mistake(_merge, "What is -inf minus -inf? If neither side has seen a key, the result has not either."),
)


def _ledger_with(
    round_count: Callable[[int], int] = lambda ranks: ranks - 1,
    tensors: int = 2,
    parts_per_round: Callable[[int], int] = lambda ranks: 1,
    senders: Callable[[int], int] = lambda ranks: 1,
    count_bytes: bool = True,
) -> Callable[..., dict[str, int]]:
    def estimate(sequence_length: int, hidden_size: int, dtype_bytes: int, cp_size: int) -> dict[str, int]:
        length, rounds = sequence_length // cp_size, round_count(cp_size)
        payload = tensors * length * parts_per_round(cp_size) * hidden_size * (dtype_bytes if count_bytes else 1)
        return {
            "local_sequence_length": length,
            "rounds": rounds,
            "payload_per_round_bytes": payload,
            "total_payload_per_rank_bytes": rounds * payload * senders(cp_size),
        }

    return estimate


def _one_round_too_much_in_total(
    sequence_length: int, hidden_size: int, dtype_bytes: int, cp_size: int
) -> dict[str, int]:
    right = _ledger_with()(sequence_length, hidden_size, dtype_bytes, cp_size)
    return {**right, "total_payload_per_rank_bytes": cp_size * right["payload_per_round_bytes"]}


_ROUNDS = "Your ring turns too often. Whose keys does a rank hold before anything is sent?"

LEDGER = (
    Mistake(_ledger_with(round_count=lambda ranks: ranks), _ROUNDS),
    Mistake(_one_round_too_much_in_total, _ROUNDS),
    Mistake(_ledger_with(tensors=1), "What besides the keys does a query need from the other ranks?"),
    Mistake(_ledger_with(tensors=3), "Do the queries travel as well?"),
    Mistake(
        _ledger_with(parts_per_round=lambda ranks: ranks),
        "In one round a rank passes on one part, not the whole sequence.",
    ),
    Mistake(_ledger_with(senders=lambda ranks: ranks), "The total is that of one rank, not of all together."),
    Mistake(_ledger_with(count_bytes=False), "You count numbers. How large is a number?"),
    Mistake(_ledger_with(), "The numbers would be right, but this call has no answer. Which calls should be refused?"),
)

"""What `attention` and `plan` offer: one table, read by the checks, by the documentation and by a test.

A feature is exact in every combination of layout, schedule and dtype that `verdict` does not refuse;
tests/python/test_support.py runs each combination against the oracle. `table()` is the text between the markers in
docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXCHANGES = ("auto", "all_to_all", "all_gather", "p2p")
SCHEDULES = ("auto", "ring")
SCHEDULES_TO_COME = ("gather", "ulysses")
LAYOUTS = ("BNSD", "BSND", "BSH", "SBH", "TND")
DTYPES = ("float32", "bfloat16", "float16", "float64")
EXACT = "exact"


@dataclass(frozen=True)
class Refusal:
    """A value of an argument that is refused with NotImplementedError, and what to do instead."""

    argument: str
    offered: str
    refused: str
    instead: str
    is_refused: Callable[[Any], bool]

    def message(self, value: Any) -> str:
        """What the error says."""
        shown = value if isinstance(value, str | int | float) else type(value).__name__
        return f"{self.argument}={shown} is not offered yet (offered: {self.offered}); {self.instead}"


REFUSALS = (
    Refusal(
        "schedule",
        ", ".join(SCHEDULES),
        ", ".join(SCHEDULES_TO_COME),
        'use schedule="ring"',
        SCHEDULES_TO_COME.__contains__,
    ),
    Refusal(
        "device",
        "cpu (and meta, for shapes)",
        "all others",
        "move query, key and value to the CPU",
        lambda device: device not in ("cpu", "meta"),
    ),
    Refusal("alibi", "slopes without a gradient", "slopes with one", "detach them, or give a bias tensor", bool),
)

# What a call may hold beside query, key and value, with what is offered of it.
FEATURES = {
    "mask": "full, causal, window, chunked, prefix, documents, bands, and their `&` and `|`",
    "shard_map": "contiguous, head_tail, striped, per_document, from_lengths, from_segments, balanced",
    "kv_shard_map": "another map, another length than the queries'",
    "attn_mask (bool)": "tensors that expand to [B, N, local queries, all keys]",
    "attn_mask (float)": "likewise, with its gradient",
    "bias (tensor)": "likewise, with its gradient",
    "bias (alibi)": "[N] or [B, N] slopes",
    "sink": "[N], with its gradient",
    "softcap": "numbers above 0",
    "dropout_p": "at least 0, below 1; seed, offset, head_offset, batch_offset, total_heads",
    "return_stats": "max, sum and lse, with the gradient of lse",
}


def refusal_of(argument: str, value: Any) -> str | None:
    """What a call with this value is told, None where it is offered."""
    for entry in REFUSALS:
        if entry.argument == argument and entry.is_refused(value):
            return entry.message(value)
    return None


def check_offered(argument: str, value: Any) -> None:
    """Raises NotImplementedError if the table refuses `value` for `argument`."""
    message = refusal_of(argument, value)
    if message is not None:
        raise NotImplementedError(message)


def verdict(feature: str, layout: str, schedule: str, dtype: str) -> str:
    """`EXACT`, or the message of the refusal, for a feature in a combination."""
    if feature not in FEATURES or layout not in LAYOUTS or dtype not in DTYPES:
        raise ValueError(f"{feature}, {layout}, {dtype}: not in the table")
    return refusal_of("schedule", schedule) or EXACT


def table() -> str:
    """The tables in Markdown."""
    schedules = (*SCHEDULES, *SCHEDULES_TO_COME)
    head = [
        f"| given | offered | {' | '.join(LAYOUTS)} | {' | '.join(f'schedule={name}' for name in schedules)} |",
        "|" + "---|" * (2 + len(LAYOUTS) + len(schedules)),
    ]
    rows = []
    for feature, offered in FEATURES.items():
        by_layout = [_cell(feature, (layout,), SCHEDULES) for layout in LAYOUTS]
        by_schedule = [_cell(feature, LAYOUTS, (schedule,)) for schedule in schedules]
        rows.append(f"| `{feature}` | {offered} | {' | '.join([*by_layout, *by_schedule])} |")
    also = f"\nIn {', '.join(DTYPES)}, and with each exchange: {', '.join(EXCHANGES)}.\n\n"
    refused = ["| argument | offered | NotImplementedError for | instead |", "|---|---|---|---|"]
    refused += [f"| `{entry.argument}` | {entry.offered} | {entry.refused} | {entry.instead} |" for entry in REFUSALS]
    return "\n".join(head + rows) + "\n" + also + "\n".join(refused) + "\n"


def _cell(feature: str, layouts: tuple[str, ...], schedules: tuple[str, ...]) -> str:
    verdicts = {
        verdict(feature, layout, schedule, dtype) == EXACT
        for layout in layouts
        for schedule in schedules
        for dtype in DTYPES
    }
    return "exact" if verdicts == {True} else "refused" if verdicts == {False} else "in part"

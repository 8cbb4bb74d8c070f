"""What `attention` and `plan` offer: one table, read by the checks and by the documentation.

`table()` is the text between the markers in docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXCHANGES = ("auto", "all_to_all", "all_gather", "p2p")
SCHEDULES = ("auto", "ring")
LAYOUTS = ("BNSD", "BSND", "BSH", "SBH")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Support:
    """One argument: what is offered, what of it is refused with NotImplementedError, and what to do instead."""

    argument: str
    offered: str
    refused: str
    instead: str
    is_refused: Callable[[Any], bool]


def _is_set(value: Any) -> bool:
    return value is not None


MATRIX = (
    Support("layout", ", ".join(LAYOUTS), "TND", "pack with layout BSND and mask=documents(lengths=...)", "TND".__eq__),
    Support("attn_mask", "None", "tensors", "build the mask from masks, such as bands(...)", _is_set),
    Support("bias", "None", "alibi and tensors", "leave it out", _is_set),
    Support("softcap", "None", "numbers", "leave it out", _is_set),
    Support("dropout_p", "0", "anything else", "apply dropout outside attention", lambda p: p != 0),
    Support("seed", "None", "anything else", "leave it out; without dropout nothing is drawn", _is_set),
    Support(
        "schedule",
        ", ".join(SCHEDULES),
        "gather, ulysses",
        'use schedule="ring"',
        lambda schedule: schedule in ("gather", "ulysses"),
    ),
    Support(
        "device",
        "cpu (and meta, for shapes)",
        "all others",
        "move query, key and value to the CPU",
        lambda device: device not in ("cpu", "meta"),
    ),
)


def check_offered(argument: str, value: Any) -> None:
    """Raises NotImplementedError if the table refuses `value` for `argument`."""
    for entry in MATRIX:
        if entry.argument == argument and entry.is_refused(value):
            shown = value if isinstance(value, str | int | float) else type(value).__name__
            raise NotImplementedError(
                f"{argument}={shown} is not offered yet (offered: {entry.offered}); {entry.instead}"
            )


def table() -> str:
    """The table in Markdown."""
    rows = [f"| `{entry.argument}` | {entry.offered} | {entry.refused} | {entry.instead} |" for entry in MATRIX]
    also = [
        f"| dtype of the tensors | {', '.join(DTYPES)} | - | - |",
        f"| `exchange` | {', '.join(EXCHANGES)} | - | - |",
        "| `sink` | None, or float32 [query heads] (float64 with float64 tensors) | - | - |",
    ]
    head = ["| argument | offered | NotImplementedError for | instead |", "|---|---|---|---|"]
    return "\n".join(head + also + rows) + "\n"

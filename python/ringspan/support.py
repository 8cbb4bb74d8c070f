"""What `attention` and `plan` offer: one table, read by the checks, by the documentation and by a test.

A feature is exact in every combination of layout, schedule and dtype that `verdict` does not refuse;
tests/python/test_support.py runs each combination against the oracle. `table()` is the text between the markers in
docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringspan.schedules import SCHEDULES, check_schedule

EXCHANGES = ("auto", "all_to_all", "all_gather", "p2p")
LAYOUTS = ("BNSD", "BSND", "BSH", "SBH", "TND")
DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICES = ("cpu", "cuda", "npu")
EXACT = "exact"

_NO_ARGUMENT = "its op has no such argument"
# What the steps on an accelerator cannot do of a call, by the name of an argument or a dtype, and why.
DEVICE_REFUSALS = {
    "cuda": {
        "attn_mask": "its ops take no mask beside the pairs that a plan keeps",
        "bias": "its ops take no bias beside the pairs that a plan keeps",
        "alibi": _NO_ARGUMENT,
        "softcap": _NO_ARGUMENT,
        "dropout_p": "its ops draw by local index, so a split would change the pairs",
        "return_stats": "its ops return no row maximum",
        "the row maximum": "its ops do not return it",
        "the gradient of lse": _NO_ARGUMENT,
        "float64": "its ops compute in fp32",
    },
    "npu": {
        "attn_mask": "its mask would have to be cut for every step",
        "bias": "its op gives no gradient of one and cuts none",
        "alibi": _NO_ARGUMENT,
        "softcap": _NO_ARGUMENT,
        "dropout_p": "its op draws by local index, so a split would change the pairs",
        "the gradient of lse": _NO_ARGUMENT,
        "float64": "its op computes in fp32",
    },
}


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
        "device",
        "cpu, cuda and npu (and meta, for shapes)",
        "all others",
        "move query, key and value to the CPU",
        lambda device: device not in (*DEVICES, "meta"),
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


# The features of the table above by the names of DEVICE_REFUSALS, where these differ.
_NAMES_OF_FEATURES = {
    "attn_mask (bool)": ("attn_mask",),
    "attn_mask (float)": ("attn_mask",),
    "bias (tensor)": ("bias",),
    "bias (alibi)": ("alibi",),
    "return_stats": ("return_stats", "the gradient of lse"),
}


def device_refusal(device: str, given: Sequence[str]) -> str:
    """What a call on `device` with these arguments and dtypes is told, "" where all are offered."""
    refused = DEVICE_REFUSALS.get(device, {})
    for name in given:
        if name in refused:
            return f"{name} is not offered on {device}: {refused[name]}; leave it out, or move the call to the CPU"
    return ""


def check_on_device(device: str, argument: str) -> None:
    """Raises NotImplementedError if the table refuses `argument` on `device`."""
    message = device_refusal(device, (argument,))
    if message:
        raise NotImplementedError(message)


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
    check_schedule(schedule)
    return EXACT


def table() -> str:
    """The tables in Markdown."""
    head = [
        f"| given | offered | {' | '.join(LAYOUTS)} | {' | '.join(f'schedule={name}' for name in SCHEDULES)} |",
        "|" + "---|" * (2 + len(LAYOUTS) + len(SCHEDULES)),
    ]
    rows = []
    for feature, offered in FEATURES.items():
        by_layout = [_cell(feature, (layout,), SCHEDULES) for layout in LAYOUTS]
        by_schedule = [_cell(feature, LAYOUTS, (schedule,)) for schedule in SCHEDULES]
        rows.append(f"| `{feature}` | {offered} | {' | '.join([*by_layout, *by_schedule])} |")
    also = f"\nOn the CPU, in {', '.join(DTYPES)}, and with each exchange: {', '.join(EXCHANGES)} (all_gather with\n"
    also += "schedule gather alone). `ringspan.hybrid` and `ringspan.double_ring` as what they are made of.\n\n"
    also += "\n".join(_device_table()) + "\n\n"
    refused = ["| argument | offered | NotImplementedError for | instead |", "|---|---|---|---|"]
    refused += [f"| `{entry.argument}` | {entry.offered} | {entry.refused} | {entry.instead} |" for entry in REFUSALS]
    return "\n".join(head + rows) + "\n" + also + "\n".join(refused) + "\n"


def _device_table() -> list[str]:
    devices = DEVICES[1:]
    rows = [f"| given | {' | '.join(f'device={name}' for name in devices)} |", "|" + "---|" * (1 + len(devices))]
    for feature in (*FEATURES, *DTYPES):
        rows.append(f"| `{feature}` | {' | '.join(device_cell(feature, device) for device in devices)} |")
    return rows


def device_cell(feature: str, device: str) -> str:
    """`EXACT`, or what is refused of a feature or dtype on an accelerator."""
    names = _NAMES_OF_FEATURES.get(feature, (feature,))
    reasons = [DEVICE_REFUSALS[device].get(name) for name in names]
    if not any(reasons):
        return EXACT
    refused = "; ".join(f"{name}: {why}" for name, why in zip(names, reasons, strict=True) if why)
    return f"refused ({refused})" if all(reasons) or feature not in FEATURES else f"exact, but refused: {refused}"


def _cell(feature: str, layouts: tuple[str, ...], schedules: tuple[str, ...]) -> str:
    verdicts = {
        verdict(feature, layout, schedule, dtype) == EXACT
        for layout in layouts
        for schedule in schedules
        for dtype in DTYPES
    }
    return "exact" if verdicts == {True} else "refused" if verdicts == {False} else "in part"

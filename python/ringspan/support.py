"""What `attention` and `plan` offer and refuse: one table, read by the checks, by the documentation and by a test.

On the CPU every feature is exact in every layout, schedule and dtype: tests/python/test_support.py runs each against
the oracle. `table()` is the text between the markers in docs/python.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringspan.names import DEVICES, DTYPES

EXACT = "exact"

_NO_ARGUMENT = "its op has no such argument"
# What changes the arithmetic of a call and is offered on an accelerator unless the table below says otherwise. What
# neither names is refused there: a new argument must not be left out in silence.
_OFFERED_ON_DEVICES = ("sink", "return_stats", "the row maximum", "the gradient of lse", *DTYPES)
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
        reason = refused.get(name, "" if name in _OFFERED_ON_DEVICES else _NO_ARGUMENT)
        if reason:
            return f"{name} is not offered on {device}: {reason}; leave it out, or move the call to the CPU"
    return ""


def check_offered(argument: str, value: Any) -> None:
    """Raises NotImplementedError if the table refuses `value` for `argument`."""
    for entry in REFUSALS:
        if entry.argument == argument and entry.is_refused(value):
            shown = value if isinstance(value, str | int | float) else type(value).__name__
            raise NotImplementedError(
                f"{argument}={shown} is not offered yet (offered: {entry.offered}); {entry.instead}"
            )


def table() -> str:
    """The tables in Markdown."""
    devices = DEVICES[1:]
    rows = [f"| given | offered | {' | '.join(f'on {name}' for name in devices)} |", "|" + "---|" * (2 + len(devices))]
    for feature, offered in (FEATURES | dict.fromkeys(DTYPES, "")).items():
        rows.append(f"| `{feature}` | {offered} | {' | '.join(device_cell(feature, device) for device in devices)} |")
    refused = ["| argument | offered | NotImplementedError for | instead |", "|---|---|---|---|"]
    refused += [f"| `{entry.argument}` | {entry.offered} | {entry.refused} | {entry.instead} |" for entry in REFUSALS]
    return "\n".join(rows) + "\n\n" + "\n".join(refused) + "\n"


def device_cell(feature: str, device: str) -> str:
    """`EXACT`, or what is refused of a feature or dtype on an accelerator."""
    names = _NAMES_OF_FEATURES.get(feature, (feature,))
    reasons = [DEVICE_REFUSALS[device].get(name) for name in names]
    if not any(reasons):
        return EXACT
    refused = "; ".join(f"{name}: {why}" for name, why in zip(names, reasons, strict=True) if why)
    return f"refused ({refused})" if all(reasons) or feature not in FEATURES else f"exact, but refused: {refused}"

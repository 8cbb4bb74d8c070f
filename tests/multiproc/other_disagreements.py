"""Disagreements about the contract's op in a group, about `unshard` and about the loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from cases import Case
from disagreement_jobs import Disagreement, Side
from disagreements import DTYPES, EXCHANGES, ROWS, SCHEDULES

Pair = tuple[str, dict[str, Any], dict[str, Any], str, tuple]

FULL = {"full_mask": "BNSK", "sparse_mode": 1}
# What, two ways to call ("case ..." are fields of the case), what is expected, what messages show.
CONTRACT: list[Pair] = [
    ("scale", {"scale": 0.5}, {"scale": 0.25}, "refused", (0.5, 0.25)),
    ("scale by one ulp", {"scale": 0.1}, {"scale": 0.1 + 2**-56}, "refused", (0.1, 0.1 + 2**-56)),
    ("keep_prob", {"keep_prob": 0.75}, {"keep_prob": 0.5}, "refused", (0.75, 0.5)),
    ("keep_prob given", {}, {"keep_prob": 0.75}, "refused", (0.75, 1)),
    ("sparse_mode", {"compressed": True, "sparse_mode": 2}, {"compressed": True, "sparse_mode": 4, "pre_tockens": 2,
     "next_tockens": 0}, "refused", ()),
    ("pre_tockens", {"compressed": True, "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1},
     {"compressed": True, "sparse_mode": 4, "pre_tockens": 3, "next_tockens": 1}, "refused", (-2, -3)),
    ("next_tockens", {"compressed": True, "sparse_mode": 4, "pre_tockens": 3, "next_tockens": 5},
     {"compressed": True, "sparse_mode": 4, "pre_tockens": 3, "next_tockens": 4}, "refused", (5, 4)),
    ("prefix", {"compressed": True, "sparse_mode": 6, "prefix": [3, 5]},
     {"compressed": True, "sparse_mode": 6, "prefix": [3, 6]}, "refused", (5, 6)),
    ("a mask given", {}, FULL, "refused", ()),
    ("modes 0 and 1 with a mask", {**FULL, "sparse_mode": 0}, FULL, "either", ()),
    ("heads of a mask", FULL, {**FULL, "full_mask": "BSK"}, "either", ()),
    ("pse given", {}, {"pse": "BNSK"}, "refused", ("none",)),
    ("rows of pse", {"pse": "BNSK", "schedule": "q_ring"}, {"pse": "BNK", "schedule": "q_ring"}, "refused", ()),
    ("batch of pse", {"pse": "BNSK"}, {"pse": "NSK"}, "either", ()),
    ("sink given", {}, {"case sink": (0.5,) * 4}, "refused", ("none",)),
    ("sink", {"case sink": (0.5,) * 4}, {"case sink": (0.5, 0.5, 0.5, 2.25)}, "refused", (0.5, 2.25)),
    ("schedule", {"schedule": "ring"}, {"schedule": "gather"}, "refused", ("ring", "gather")),
    ("exchange", {"exchange": "p2p"}, {"exchange": "all_to_all"}, "refused", ("p2p", "all_to_all")),
    ("q_map", {"case split": ("striped",)}, {"case split": ("head_tail",)}, "refused", ()),
    ("kv_map", {"case kv_split": ("striped",)}, {"case kv_split": ("head_tail",)}, "refused", ()),
    ("layout", {"case layout": "BNSD"}, {"case layout": "BSND"}, "refused", ("BNSD", "BSND")),
    ("dtype", {"case dtype": "float32"}, {"case dtype": "float16"}, "refused", (DTYPES["float32"], DTYPES["float16"])),
    ("head_num", {"case q_heads": 4}, {"case q_heads": 2}, "refused", (4, 2)),
    ("gradients", {"grads": "qkv"}, {"grads": ""}, "refused", ("true", "false")),
    ("inner_precise", {"inner_precise": 0}, {"inner_precise": 2}, "either", ()),
    ("what has no effect", {"sync": True}, {"gen_mask_parallel": False}, "equal", ()),
    ("no maps", {"drop": ("q_map", "kv_map"), "case split": ("contiguous",)}, {"case split": ("contiguous",)}, "either",
     ()),
    ("full, mode 0", {"sparse_mode": 0}, {}, "equal", ()),
    ("auto, ring", {"schedule": "auto"}, {"schedule": "ring"}, "equal", ()),
]  # fmt: skip

DOCUMENTS: list[Pair] = [
    ("actual_seq_qlen", {"ends": [5], "kv_ends": [5]}, {"ends": [6], "kv_ends": [6]}, "refused", (5, 6)),
    ("lengths with empty ones", {"ends": [5], "kv_ends": [5]}, {"ends": [5, 5], "kv_ends": [5, 5]}, "either", ()),
]


def _side(front: str, case: Case, given: dict[str, Any]) -> Side:
    fields = {name[5:]: value for name, value in given.items() if name.startswith("case ")}
    more = {name: value for name, value in given.items() if not name.startswith("case ")}
    return Side(front, case.but(**fields), more)


def of_contract(seed: int, world: int, times: int = 2) -> Iterator[Disagreement]:
    """Each of CONTRACT so often, beside other arguments."""
    for turn in range(times):
        for what, one, two, expected, words in CONTRACT:
            source = random.Random(f"{seed} {world} {what} {turn}")
            case = Case(
                split=source.choice([("contiguous",), ("striped",)]),
                seq_len=ROWS * world,
                batch=2,
                dtype=source.choice(["float32", "bfloat16"]),
                schedule=source.choice(SCHEDULES),
                exchange=source.choice(EXCHANGES),
                layout=source.choice(["BNSD", "BSND", "BSH"]),
                kv_heads=2,
                scale=0.3,
            )
            yield Disagreement(what, _side("contract", case, one), _side("contract", case, two), expected, words)
        for what, one, two, expected, words in DOCUMENTS:
            case = Case(("full",), ("head_tail",), seq_len=ROWS * world, layout="TND", schedule=SCHEDULES[turn])
            end = ROWS * world
            sides = [
                _side("contract", case, {
                    "softmax_layout": "TND", "compressed": True, "sparse_mode": 3,
                    **{name: [*ends, end] for name, ends in given.items()},
                })
                for given in (one, two)
            ]  # fmt: skip
            yield Disagreement(what, *sides, expected, words)


HELPERS: list[tuple[str, Pair]] = [
    ("unshard", ("width", {"shape": (3,)}, {"shape": (4,)}, "refused", (3, 4))),
    ("unshard", ("axes", {"shape": (3,)}, {"shape": (3, 1)}, "refused", ())),
    ("unshard", ("dim", {"shape": (8,), "dim": 0}, {"shape": (8,), "dim": 1}, "refused", ())),
    ("unshard", ("dtype", {"case dtype": "float32"}, {"case dtype": "float64"}, "refused",
                 (DTYPES["float32"], DTYPES["float64"]))),
    ("unshard", ("dtype of 16 bits", {"case dtype": "bfloat16"}, {"case dtype": "float16"}, "refused",
                 (DTYPES["bfloat16"], DTYPES["float16"]))),
    ("unshard", ("grad", {"grad": "sum", "wants": True}, {"grad": "slice", "wants": True}, "refused",
                 ("sum", "slice"))),
    ("unshard", ("gradient wanted", {"grad": "sum", "wants": True}, {"grad": "sum"}, "refused", ())),
    ("unshard", ("map", {"case split": ("striped",)}, {"case split": ("head_tail",)}, "refused",
                 ("kind=2|striped", "kind=1|head_tail"))),
    ("unshard", ("map of other lengths", {"case split": "lengths"}, {"case split": ("contiguous",)}, "either", ())),
    ("unshard", ("grad without one", {"grad": "sum"}, {"grad": "slice"}, "either", ())),
    ("unshard", ("dim from the end", {"dim": 0, "shape": (3,)}, {"dim": -2, "shape": (3,)}, "equal", ())),
    ("loss", ("averaged_by", {"averaged_by": 2}, {"averaged_by": 3}, "refused", (2, 3))),
    ("loss", ("step_valid", {"step_valid": 40}, {}, "refused", ("None|none", "given"))),
    ("loss", ("step_valid, other numbers", {"step_valid": 40}, {"step_valid": 50}, "accepted", ())),
    ("loss", ("tokens", {"tokens": 3}, {"tokens": 5}, "accepted", ())),
    ("loss", ("gradient wanted", {"wants": True}, {"wants": False}, "accepted", ())),
]  # fmt: skip


def of_helpers(world: int) -> Iterator[Disagreement]:
    """Each of HELPERS on every rank in turn."""
    for turn in range(world):
        for front, (what, one, two, expected, words) in HELPERS[turn:] + HELPERS[:turn]:
            case = Case(split=("contiguous",), seq_len=ROWS * world + 1)
            sides = []
            for given in (one, two):
                if given.get("case split") == "lengths":
                    given = {**given, "case split": ("lengths", (ROWS, *[ROWS] * (world - 2), ROWS + 1))}
                sides.append(_side(front, case, given))
            yield Disagreement(f"{front}: {what}", *sides, expected, words)

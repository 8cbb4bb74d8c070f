"""Random draws over everything that a call can vary, by every front, against the float64 oracle.

RINGSPAN_SOAK_DRAWS draws of RINGSPAN_SOAK_SEED, in pieces; by default a small spread. A draw is a function of the seed,
its number and the number of ranks alone, so RINGSPAN_SOAK_ONE=ranks:number replays a failure.
"""

from __future__ import annotations

import os
import random

import judge
import pytest
from cases import Case
from soak_jobs import Soaked
from test_schedules import SCHEDULES
from test_sweep import masks_of

DRAWS = int(os.environ.get("RINGSPAN_SOAK_DRAWS", "200"))
SEED = int(os.environ.get("RINGSPAN_SOAK_SEED", "1"))
WORLDS = [1, 2, 3, 4]
PIECE = 50  # draws that the processes of a pool do under one watchdog
SHAPES = ["".join(axis for axis, kept in zip("BNSK", f"{code:04b}", strict=True) if kept == "1") for code in range(16)]
FRONTS = [("attention", 60), ("DTensors", 12), ("contract", 14), ("flex", 10), ("compiled", 2)]
KINDS = ("contiguous", "head_tail", "striped", "lengths", "single", "positions", "entries")


def dealt(source: random.Random, positions: list[int], world: int) -> list[list[int]]:
    """Positions dealt out at random: shards may be empty, or of one row."""
    shards: list[list[int]] = [[] for _ in range(world)]
    weights = [source.choice([0, 0.05, 1, 1, 3]) for _ in range(world)]
    weights[source.randrange(world)] += 0.5
    for position in positions:
        shards[source.choices(range(world), weights)[0]].append(position)
    return shards


def padded(source: random.Random, rows: list[int], length: int) -> tuple[int, ...]:
    """Rows with padding in between, up to this length."""
    rows = list(rows)
    while len(rows) < length:
        rows.insert(source.randint(0, len(rows)), -1)
    return tuple(rows)


def split_of(source: random.Random, kind: str, seq_len: int, world: int, batch: int) -> tuple:
    """A split of one kind."""
    order = list(range(seq_len))
    if kind in ("contiguous", "head_tail", "striped"):
        return (kind,)
    if kind == "single":  # shards of one row, wherever there are enough ranks and rows
        singles = [1] * min(world - 1, seq_len)
        return (
            "lengths",
            tuple(source.sample([*singles, *[0] * (world - 1 - len(singles)), seq_len - len(singles)], world)),
        )
    if kind == "lengths":
        cuts = sorted(source.choices(range(seq_len + 1), k=world - 1))
        return ("lengths", tuple(b - a for a, b in zip([0, *cuts], [*cuts, seq_len], strict=True)))
    entries = []
    for _ in range(batch if kind == "entries" else 1):
        source.shuffle(order)
        entries.append(dealt(source, order, world))
    rows = [max(len(entry[rank]) for entry in entries) + source.choice([0, 0, 1, 2]) for rank in range(world)]
    filled = tuple(tuple(padded(source, rows_, rows[rank]) for rank, rows_ in enumerate(entry)) for entry in entries)
    return ("entries", filled) if kind == "entries" else ("positions", filled[0])


def drawn(number: int, world: int) -> Soaked:
    """Draw `number` of this seed, on so many ranks."""
    source = random.Random(f"{SEED} {world} {number}")
    front = source.choices([name for name, _ in FRONTS], [weight for _, weight in FRONTS])[0]
    seq_len, batch = source.choice([1, 2, 3, 5, 7, 16, 33, 65]), source.choice([1, 2, 3])
    q_heads, kv_heads = source.choice([(1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (5, 1)])
    kind = source.choice(KINDS)
    case = Case(
        source.choice([*masks_of(seq_len, batch).values()]),
        split_of(source, kind, seq_len, world, batch),
        seq_len=seq_len,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        qk_dim=source.choice([1, 5, 8, 16, 33]),
        v_dim=source.choice([1, 7, 8, 24]),
        dtype=source.choice(["float32", "float64", "bfloat16", "float16"]),
        layout=source.choice(["BNSD", "BSND", "BSH", "SBH", *(["TND"] if batch == 1 else [])]),
        exchange=source.choice(["all_to_all", "p2p", "auto"]),
        schedule=source.choice(["ring", *SCHEDULES[world]]),
        scale=source.choice([None, 0.25, -0.5]),
        seed=number,
        lse_grad=source.random() < 0.5,
        squeezed=front in ("attention", "compiled") and source.random() < 0.4,
        **_terms(source, q_heads),
    )
    if kind != "entries" and source.random() < 0.2 and front in ("attention", "flex"):
        case = _cross(source, case, world)
    return _fitted(source, front, case, world)


def _terms(source: random.Random, q_heads: int) -> dict:
    """Each now and then; pair tensors of all 16 shapes."""
    choices = {
        "sink": tuple(round(source.gauss(0, 2), 2) for _ in range(q_heads)),
        "softcap": source.choice([0.8, 3.0]),
        "attn_mask": source.choice(SHAPES),
        "bias": source.choice(SHAPES),
        "alibi": tuple(source.randrange(1, 9) / 64 for _ in range(q_heads)),
        "dropout": (source.choice([0.1, 0.5]), source.getrandbits(62), source.getrandbits(40)),
    }
    chosen = {name: value for name, value in choices.items() if source.random() < 0.35}
    if chosen.keys() >= {"bias", "alibi"}:
        del chosen["alibi"]
    return chosen


def _cross(source: random.Random, case: Case, world: int) -> Case:
    """Keys of another length, split in their own way."""
    kv_len = source.choice([1, 4, 9, 30])
    kv_split = split_of(source, source.choice(["contiguous", "striped", "lengths", "single"]), kv_len, world, 1)
    mask = source.choice([("full",), ("causal",), ("window", 3, 1)])
    return case.but(kv_len=kv_len, kv_split=kv_split, mask=mask, alibi=None)


def _fitted(source: random.Random, front: str, case: Case, world: int) -> Soaked:
    """The case as far as the front offers it."""
    if front == "DTensors":  # counts rows in its own way: ceil(seq_len / world) in front
        rows = -(-case.seq_len // world)
        lengths = tuple(max(0, min(rows, case.seq_len - rows * rank)) for rank in range(world))
        even = case.seq_len % (2 * world) == 0
        split = source.choice([("head_tail",), ("striped",)]) if even else ("lengths", lengths)
        case = case.but(split=split, alibi=None)
    elif front == "contract":
        case = _in_contract(source, case)
    elif front == "flex":
        case = case.but(
            dtype="float64" if case.dtype == "float64" else "float32", layout="BNSD", sink=None, alibi=None,
            dropout=None, seq_len=case.seq_len,
        )  # fmt: skip
    return Soaked(front, case)


def _in_contract(source: random.Random, case: Case) -> Case:
    mask = source.choice([("full",), ("causal",), ("window", 3, 1)]) if case.attn_mask is None else ("full",)
    return case.but(
        mask=mask,
        dtype="float32" if case.dtype == "float64" else case.dtype,
        layout="BNSD" if case.layout == "TND" else case.layout,
        v_dim=min(case.v_dim, case.qk_dim),
        scale=0.25,
        softcap=None,
        alibi=None,
        dropout=None,
        lse_grad=False,
        attn_mask=None if case.attn_mask is None else source.choice(["BNSK", "BSK", "SK"]),
        bias=None if case.bias is None else source.choice(["BNSK", "NSK", "BNK", "NK"]),
        seed=2 * case.seed + 1,  # then the bias comes as such
    )


def check(pool, world: int, numbers: list[int]) -> None:
    draws = [drawn(number, world) for number in numbers]
    faults = [
        f"{text}\n    replay: RINGSPAN_SOAK_SEED={SEED} RINGSPAN_SOAK_ONE={world}:{numbers[place]} python -m pytest "
        "tests/multiproc/test_soak.py"
        for place, text in judge.faults_of_fronts(pool, world, draws)
    ]
    assert not faults, f"{len(faults)} of {len(draws)} draws have faults\n" + "\n".join(faults[:12])


ONE = os.environ.get("RINGSPAN_SOAK_ONE")
PIECES = [
    (world, list(range(begin, min(begin + PIECE, DRAWS // len(WORLDS)))))
    for world in WORLDS
    for begin in range(0, DRAWS // len(WORLDS), PIECE)
]
if ONE:
    PIECES = [(int(ONE.split(":")[0]), [int(ONE.split(":")[1])])]


@pytest.mark.parametrize(("world", "numbers"), PIECES, ids=[f"{world}-{numbers[0]}" for world, numbers in PIECES])
def test_drawn_calls(pool, world, numbers):
    check(pool, world, numbers)


def test_every_kind_is_drawn():
    """Of what the first draws of the default seed hold."""
    draws = [drawn(number, 4) for number in range(400)]
    assert {one.front for one in draws} == {name for name, _ in FRONTS}
    assert {one.case.bias for one in draws} | {one.case.attn_mask for one in draws} == {None, *SHAPES}
    assert {one.case.split[0] for one in draws} >= {*KINDS} - {"single"}
    assert {str(one.case.schedule) for one in draws} == {"ring", *map(str, SCHEDULES[4])}

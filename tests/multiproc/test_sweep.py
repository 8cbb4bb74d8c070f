"""Every mask with every split by every exchange, and a drawn sample of all other choices, against the oracle."""

from __future__ import annotations

import itertools
import random

import judge
import pytest
from cases import Case

from ringspan import names

WORLDS = [1, 2, 3, 4]
EXCHANGES = names.EXCHANGES[1:]  # without auto


def masks_of(seq_len: int, batch: int) -> dict[str, tuple]:
    """One rule of each kind; those with rows differ between batch entries."""
    ids = tuple(
        tuple(0 if (row + position) % 7 == 6 else 1 + position // (3 + 2 * row) for position in range(seq_len))
        for row in range(batch)
    )
    striped_ids = tuple(position % 3 for position in range(seq_len))
    half = seq_len // 2
    return {
        "full": ("full",),
        "causal": ("causal",),
        "window": ("window", 3, 0),
        "window_both": ("window", 5, 2),
        "window_open": ("window", None, 1),
        "chunked": ("chunked", 4),
        "prefix": ("prefix", tuple(2 + 3 * row for row in range(batch))),
        "documents": ("ids", ids),
        "documents_full": ("ids", ids, ("full",)),
        "documents_window": ("ids", striped_ids, ("window", 2, 1)),
        "bands": ("bands", ((0, half, 1, seq_len, -2, 3), (half, seq_len, 0, half + 1, None, None))),
        "and": ("and", ("causal",), ("ids", ids, ("full",))),
        "or": ("or", ("window", 2, 0), ("bands", ((half, seq_len, 0, 1, None, None),))),
        "nothing": ("bands", ((0, seq_len, 0, 0, None, None),)),
    }


def splits_of(seq_len: int, world: int) -> dict[str, tuple]:
    """One split of each kind; lengths include an empty shard, positions a shuffle with padding rows."""
    lengths = [seq_len // world] * world
    lengths[0] = 0
    lengths[-1] = seq_len - sum(lengths[:-1])
    order = list(range(seq_len))
    random.Random(seq_len).shuffle(order)
    rows = [order[rank::world] for rank in range(world)]
    padded = tuple(
        tuple(row[: len(row) // 2] + [-1] * rank + row[len(row) // 2 :] + [-1]) for rank, row in enumerate(rows)
    )
    return {
        "contiguous": ("contiguous",),
        "head_tail": ("head_tail",),
        "striped": ("striped",),
        "lengths": ("lengths", tuple(lengths)),
        "positions": ("positions", padded),
    }


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_mask_with_every_split(pool, world, exchange):
    seq_len, batch = 19, 2
    cases = [
        Case(mask, split, seq_len=seq_len, batch=batch, exchange=exchange, seed=100 + index, lse_grad=True)
        for index, (mask, split) in enumerate(
            itertools.product(masks_of(seq_len, batch).values(), splits_of(seq_len, world).values())
        )
    ]
    judge.check(pool, world, cases)


HEADS = [(1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (3, 3)]


def drawn_cases(world: int, dtype: str, count: int, heads: list[tuple[int, int]] = HEADS) -> list[Case]:
    """A repeatable sample over everything that a call can vary."""
    source = random.Random(f"{world} {dtype}")
    found = []
    for seed in range(count):
        seq_len, batch = source.choice([1, 2, 3, 7, 16, 33, 65, 130]), source.choice([1, 2, 3])
        q_heads, kv_heads = source.choice(heads)
        qk_dim, v_dim = source.choice([(8, 8), (1, 1), (5, 7), (24, 16), (16, 24), (64, 64), (33, 128)])
        found.append(
            Case(
                source.choice(list(masks_of(seq_len, batch).values())),
                source.choice(list(splits_of(seq_len, world).values())),
                seq_len=seq_len,
                batch=batch,
                q_heads=q_heads,
                kv_heads=kv_heads,
                qk_dim=qk_dim,
                v_dim=v_dim,
                dtype=dtype,
                layout=source.choice(["BNSD", "BSND", "BSH", "SBH", *(["TND"] if batch == 1 else [])]),
                exchange=source.choice([*EXCHANGES, "auto"]),
                scale=source.choice([None, 0.31, -0.5]),
                seed=seed,
                lse_grad=source.choice([True, False]),
                **drawn_terms(source, q_heads),
            )
        )
    return found


def drawn_terms(source: random.Random, q_heads: int) -> dict:
    """What changes single pairs: each now and then, all combinations possible."""
    slopes = tuple(source.randrange(1, 9) / 64 for _ in range(q_heads))
    choices = {
        "sink": tuple(round(source.gauss(0, 2), 2) for _ in range(q_heads)),
        "softcap": source.choice([0.8, 3.0]),
        "attn_mask": source.choice(["BNSK", "SK", "BK", "NSK"]),
        "bias": source.choice(["BNSK", "SK", "NSK", "NK", "BSK", "S"]),
        "alibi": slopes,
        "dropout": (source.choice([0.1, 0.5]), source.getrandbits(62), source.getrandbits(40)),
    }
    chosen = {name: value for name, value in choices.items() if source.random() < 0.3}
    if chosen.keys() >= {"bias", "alibi"}:
        del chosen["alibi"]
    return chosen


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("world", WORLDS)
def test_drawn_cases(pool, world, dtype):
    judge.check(pool, world, drawn_cases(world, dtype, 40))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_drawn_cases_without_a_group(dtype):
    judge.check(None, 1, drawn_cases(1, dtype, 40))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_cross_attention_with_two_maps(pool, world):
    cases = []
    for index, (q_len, kv_len) in enumerate([(5, 19), (19, 5), (8, 9), (1, 12)]):
        for exchange in EXCHANGES:
            for mask in (("full",), ("causal",), ("causal", "bottom_right"), ("window", 3, 1, "bottom_right")):
                cases.append(
                    Case(
                        mask,
                        ("striped",),
                        ("head_tail",),
                        seq_len=q_len,
                        kv_len=kv_len,
                        exchange=exchange,
                        seed=200 + index,
                        lse_grad=True,
                    )
                )
    judge.check(pool, world, cases)


@pytest.mark.parametrize("rows", [1, 2, 40, 300])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_decode_and_chunked_prefill(pool, world, rows):
    """Queries at the end of the sequence, dealt out; keys stay where they were; statistics of all ranks merge."""
    seq_len = 331
    tail = range(seq_len - rows, seq_len)
    dealt = tuple(tuple(tail[rank::world]) for rank in range(world))
    first = tuple(tuple(tail) if rank == 0 else () for rank in range(world))
    cases = []
    for index, (queries, keys) in enumerate(itertools.product((dealt, first), (("contiguous",), ("striped",)))):
        case = Case(
            ("causal",), ("positions", queries), keys, seq_len=seq_len, qk_dim=32, v_dim=24, seed=index,
            exchange=EXCHANGES[index % 3], dtype=("float32", "bfloat16")[index % 2], lse_grad=True,
        )  # fmt: skip
        cases += [
            case,
            case.but(mask=("window", 100, 0), sink=(0.5, -1.0, 2.0, 0.25)),
            case.but(attn_mask="SK", softcap=4.0),
        ]
    judge.check(pool, world, cases)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_do_not_lose_precision_with_ranks(pool, dtype):
    """Case A06 over masks, splits and exchanges."""
    cases = [
        Case(mask, split, seq_len=192, qk_dim=64, v_dim=64, dtype=dtype, exchange=exchange, seed=6)
        for mask, split, exchange in [
            (("causal",), ("head_tail",), "all_to_all"),
            (("causal",), ("striped",), "p2p"),
            (("full",), ("contiguous",), "all_gather"),
            (("window", 40, 0), ("contiguous",), "all_to_all"),
        ]
    ]
    judge.check_rms_growth(pool, [2, 3, 4], cases, ("out", "dq", "dk", "dv"))

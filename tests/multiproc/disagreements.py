"""Draws of calls that two ranks do not make alike: every argument in turn, beside random choices of the others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cases import Case
from disagreement_jobs import Disagreement, Side

DTYPES = {"float32": "Float|fp32|float32", "bfloat16": "BFloat16|bf16|bfloat16", "float64": "Double|fp64|float64"}
DTYPES["float16"] = r"Half|\bfp16|float16|\bf16"
SCHEDULES = ["ring", "gather", "ulysses", "pruned", "q_ring", "invariant"]
MOVING = ["ulysses", "q_ring", "invariant"]
EXCHANGES = ["all_to_all", "p2p"]
ROWS = 4  # of each rank, on average
Draw = Callable[[random.Random, int], Disagreement]
DRAWS: dict[str, Draw] = {}


def draw(make: Draw) -> Draw:
    """Adds a kind of disagreement, named by its function."""
    DRAWS[make.__name__.replace("_", " ")] = make
    return make


def base(source: random.Random, world: int, **fixed: Any) -> Side:
    """Any call of `attention`; small."""
    heads = fixed.get("q_heads", source.choice([4, 6]))
    choices = {
        "mask": source.choice([("full",), ("causal",), ("window", 3, 1)]),
        "split": source.choice([("contiguous",), ("head_tail",), ("striped",)]),
        "seq_len": ROWS * world,
        "batch": source.choice([1, 2]),
        "q_heads": heads,
        "kv_heads": source.choice([2, heads]),
        "qk_dim": 8,
        "v_dim": source.choice([8, 4]),
        "dtype": source.choice(["float32", "bfloat16", "float64", "float16"]),
        "layout": source.choice(["BNSD", "BSND", "BSH", "SBH"]),
        "exchange": source.choice(EXCHANGES),
        "schedule": source.choice(SCHEDULES),
        "scale": source.choice([None, 0.31, -0.5]),
        "softcap": source.choice([None, None, 3.0]),
        "sink": source.choice([None, tuple([0.5] * heads)]),
        "attn_mask": source.choice([None, None, "BNSK"]),
        "bias": source.choice([None, None, "NSK"]),
        "dropout": source.choice([None, None, (0.25, 7, 1)]),
        "seed": source.randrange(10**6),
    }
    return Side("attention", Case(**{**choices, **fixed}))


def twice(source: random.Random, values: list) -> list:
    """Two of them."""
    return source.sample(values, 2)


def of_case(name: str, values: list, words: Callable[[Any], Any] = lambda x: x, **fixed: Any) -> Draw:
    """A field of the case takes two of these values."""

    def make(source: random.Random, world: int) -> Disagreement:
        one, two = twice(source, values)
        side = base(source, world, **{**fixed, name: one})
        return Disagreement(name, side, side.but(**{name: two}), "refused", (words(one), words(two)))

    return make


def of_keyword(name: str, values: list, names: tuple = (), words: Callable[[Any], Any] = lambda x: x,
               **fixed: Any) -> Draw:  # fmt: skip
    """A keyword of the call takes two of these values."""

    def make(source: random.Random, world: int) -> Disagreement:
        one, two = twice(source, values)
        side = base(source, world, **fixed).but({name: one})
        return Disagreement(name, side, side.but({name: two}), "refused", (words(one), words(two)), names)

    return make


DRAWS |= {
    "batch": of_case("batch", [1, 2, 3]),
    "q_heads": of_case("q_heads", [2, 4, 8], kv_heads=2, sink=None),
    "kv_heads": of_case("kv_heads", [1, 2, 4], q_heads=4),
    "qk_dim": of_case("qk_dim", [4, 8, 16]),
    "v_dim": of_case("v_dim", [4, 8, 16]),
    "dtype": of_case("dtype", ["float32", "bfloat16", "float16"], DTYPES.get),
    "dtype of 64 bits": of_case("dtype", ["float64", "float32"], DTYPES.get, sink=None),
    "layout": of_case("layout", ["BNSD", "BSND", "BSH", "SBH"], lambda x: rf"\b{x}\b"),
    "layout without a batch": of_case("layout", ["BNSD", "TND"], lambda x: rf"\b{x}\b", batch=1),
    "schedule": of_case("schedule", SCHEDULES, lambda x: rf"\b{x}\b"),
    "exchange": of_case("exchange", ["all_to_all", "p2p", "all_gather"], lambda x: rf"\b{x}\b", schedule="gather"),
    "scale": of_case("scale", [0.5, 0.25, -0.25, 0.3, 1e-20]),
    "softcap": of_case("softcap", [2.5, 3.0, 40.0]),
    "sink, other numbers": of_case("sink", [(0.5,) * 4, (0.5, 0.5, 0.5, 1.25), (2.75,) * 4], max, q_heads=4),
    "window": of_case("mask", [("window", 2, 0), ("window", 3, 0), ("window", 5, 0)], lambda x: x[1]),
    "window's other side": of_case("mask", [("window", 2, 0), ("window", 2, 1)], lambda x: x[2]),
    "chunks": of_case("mask", [("chunked", 2), ("chunked", 3), ("chunked", 4)], lambda x: x[1]),
    "prefix": of_case("mask", [("prefix", (3,)), ("prefix", (4,)), ("prefix", (6,))], lambda x: x[1][0]),
    "kind of mask": of_case(
        "mask", [("full",), ("causal",), ("window", 3, 1), ("chunked", 3)], lambda x: rf"\b{x[0]}\b"
    ),
    "dropout_p": of_case("dropout", [(0.25, 7, 1), (0.5, 7, 1), (0.125, 7, 1)], lambda x: x[0]),
    "seed": of_case("dropout", [(0.25, 7, 1), (0.25, 8, 1), (0.25, -9, 1)], lambda x: x[1]),
    "offset": of_case("dropout", [(0.25, 7, 1), (0.25, 7, 2), (0.25, 7, 2**40)], lambda x: x[2]),
    "batch_offset": of_keyword("batch_offset", [0, 1, 5], ("batch_offset",), dropout=(0.25, 7, 1)),
    "total_heads": of_keyword("total_heads", [8, 9, 12], ("total_heads",), dropout=(0.25, 7, 1)),
}


@draw
def scale_by_one_ulp(source: random.Random, world: int) -> Disagreement:
    scale = source.choice([0.1, 0.3, 1 / 3, 7.7e-5])
    side = base(source, world, scale=scale)
    other = math.nextafter(scale, 1)
    return Disagreement("scale", side, side.but(scale=other), "refused", (scale, other), ("scale",))


@draw
def head_offset(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, dropout=(0.25, 7, 1)).but({"total_heads": 16})
    return Disagreement("head_offset", side.but({"head_offset": 4}), side.but({"head_offset": 5}), "refused", (4, 5))


@draw
def sequence_length(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, bias=None, attn_mask=None)
    other = side.case.seq_len + source.choice([-1, 1, world])
    return Disagreement("q_len", side, side.but(seq_len=other), "refused", (side.case.seq_len, other))


@draw
def length_of_keys(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, kv_split=("striped",), kv_len=9, bias=None, attn_mask=None)
    return Disagreement("kv_len", side, side.but(kv_len=10), "refused", (9, 10), ("kv_len",))


@draw
def something_given(source: random.Random, world: int) -> Disagreement:
    """On one rank, on the others not."""
    given = {
        "softcap": 3.5,
        "dropout": (0.375, 7, 1),
        "sink": (0.25,) * 4,
        "attn_mask": source.choice(["BNSK", "SK", "BK", "NSK", "K"]),
        "bias": source.choice(["BNSK", "SK", "NK", "NSK", "K"]),
        "alibi": (0.125,) * 4,
    }
    name = source.choice([*given])
    side = base(source, world, q_heads=4, kv_heads=2, **dict.fromkeys(given))
    words = {"softcap": (3.5,), "dropout": (0.375,)}.get(name, ("none",))
    sides = [side, side.but(**{name: given[name]}, **({"seed": 1} if name == "bias" else {}))]
    sides[0] = side.but(seed=sides[1].case.seed)
    source.shuffle(sides)
    return Disagreement(f"{name} given", *sides, "refused", words)


def _table(source: random.Random, world: int, kind: str, one: Any, two: Any, words: tuple) -> Disagreement:
    side = base(source, world, batch=1).but({"mask": (kind, *one)})
    return Disagreement(kind, side, side.but({"mask": (kind, *two)}), "refused", words, ("mask",))


@draw
def lengths_of_documents(source: random.Random, world: int) -> Disagreement:
    end = ROWS * world
    return _table(source, world, "lengths", ([5, end - 5], True), ([3, end - 3], False), (5, 3))


@draw
def ids_of_documents(source: random.Random, world: int) -> Disagreement:
    ids = [1 + position // 3 for position in range(ROWS * world)]
    return _table(source, world, "ids", ([*ids[:-1], 77],), ([*ids[:-1], 78],), (77, 78))


@draw
def inside_of_documents(source: random.Random, world: int) -> Disagreement:
    lengths = [5, ROWS * world - 5]
    return _table(source, world, "inside", (lengths, 21), (lengths, 22), (21, 22))


@draw
def prefixes_by_entry(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, batch=2).but({"mask": ("prefix", [2, 4])})
    return Disagreement("prefix", side, side.but({"mask": ("prefix", [2, 6])}), "refused", (4, 6), ("mask",))


@draw
def numbers_of_bands(source: random.Random, world: int) -> Disagreement:
    end = ROWS * world
    side = base(source, world, mask=("bands", ((0, end, 0, end, -12, 3),)))
    other = side.but(mask=("bands", ((0, end, 0, end, -13, 3),)))
    return Disagreement("bands", side, other, "refused", (-12, -13), ("mask",))


@draw
def order_of_masks(source: random.Random, world: int) -> Disagreement:
    side = base(source, world).but({"mask": ("window, then causal", 3)})
    return Disagreement("order of masks", side, side.but({"mask": ("causal, then window", 3)}), "either")


@draw
def operator_of_masks(source: random.Random, world: int) -> Disagreement:
    side = base(source, world).but({"mask": ("either", 3)})
    return Disagreement("operator", side, side.but({"mask": ("window, then causal", 3)}), "refused", (), ("mask",))


@draw
def corner_of_a_mask(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, kv_split=("striped",), kv_len=ROWS * world + 3, bias=None, attn_mask=None)
    one, two = (side.but({"mask": ("causal, aligned", align)}) for align in ("top_left", "bottom_right"))
    return Disagreement("corner", one, two, "refused", ("top_left", "bottom_right"), ("mask",))


@draw
def kind_of_split(source: random.Random, world: int) -> Disagreement:
    one, two = twice(source, ["contiguous", "head_tail", "striped"])
    side = base(source, world, split=(one,), attn_mask=None, bias=None)
    return Disagreement("shard_map", side, side.but(split=(two,)), "refused", (one, two), ("shard_map", "kv_shard_map"))


@draw
def split_of_keys(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, split=("contiguous",), kv_split=("striped",))
    other = side.but(kv_split=("head_tail",))
    return Disagreement("kv_shard_map", side, other, "refused", ("striped", "head_tail"), ("kv_shard_map",))


@draw
def lengths_of_shards(source: random.Random, world: int) -> Disagreement:
    one = [ROWS] * world
    two = [ROWS + 1, ROWS - 1, *[ROWS] * (world - 2)]
    side = base(source, world, split=("lengths", tuple(one)), attn_mask=None, bias=None)
    return Disagreement("lengths", side, side.but(split=("lengths", tuple(two))), "refused", (ROWS, ROWS + 1))


@draw
def segments_of_shards(source: random.Random, world: int) -> Disagreement:
    places = list(range(world))
    side = base(source, world, attn_mask=None, bias=None)
    maps = [[[(0, ROWS * place, ROWS, 1)] for place in order] for order in (places, places[::-1])]
    one, two = (side.but({"segments": segments}) for segments in maps)
    return Disagreement("segments", one, two, "refused", (), ("shard_map", "kv_shard_map"))


@draw
def axes_of_a_bias(source: random.Random, world: int) -> Disagreement:
    """Heads, batch entries or rows that are shared on one rank. With a ring each rank's rows are its own affair."""
    axis = source.choice("BNS")
    side = base(source, world, bias="BNSK", attn_mask=None, batch=2, seed=1)
    axes = "BNSK".replace(axis, "")
    must = side.case.schedule in MOVING and axis == "S"
    return Disagreement(f"bias {axes}", side, side.but({"bias_axes": axes}), "refused" if must else "either", (), ())


@draw
def axes_of_a_mask(source: random.Random, world: int) -> Disagreement:
    axis = source.choice("BNS")
    side = base(source, world, attn_mask="BNSK", bias=None, batch=2)
    axes = "BNSK".replace(axis, "")
    must = side.case.schedule in MOVING and axis == "S"
    return Disagreement(f"mask {axes}", side, side.but({"mask_axes": axes}), "refused" if must else "either", ())


@draw
def dtype_of_a_bias(source: random.Random, world: int) -> Disagreement:
    pairs = [["float32", "float64"]] if source.random() < 0.3 else [["float32", "bfloat16", "float16"]]
    one, two = twice(source, pairs[0])
    dtype = "float64" if "float64" in (one, two) else source.choice(["float32", "bfloat16", "float16"])
    side = base(source, world, dtype=dtype, bias=source.choice(["BNSK", "NK", "SK"]), attn_mask=None, seed=1)
    first, second = (side.but({"bias_dtype": getattr(torch, name)}) for name in (one, two))
    return Disagreement("dtype of a bias", first, second, "refused", (DTYPES[one], DTYPES[two]), ("bias",))


@draw
def slopes(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, bias=None, q_heads=4, kv_heads=2, batch=2)
    one, two = (side.but({"slopes": [0.5, 0.25, 0.5, last]}) for last in (1.75, 2.25))
    return Disagreement("slopes", one, two, "refused", (1.75, 2.25), ("alibi", "slopes", "bias"))


@draw
def slopes_by_entry(source: random.Random, world: int) -> Disagreement:
    """Other numbers for one entry, or the same for all, in another shape."""
    side = base(source, world, bias=None, q_heads=4, kv_heads=2, batch=2)
    row = [0.5, 0.25, 0.5, 1.75]
    other = source.choice([row, [0.5, 0.25, 0.5, 2.25]])
    words = (1.75, 2.25) if other != row else ()
    one, two = side.but({"slopes": row}), side.but({"slopes": [row, other]})
    return Disagreement("slopes by entry", one, two, "refused" if words else "either", words)


@draw
def corner_of_slopes(source: random.Random, world: int) -> Disagreement:
    side = base(source, world, bias=None, attn_mask=None, q_heads=4, kv_heads=2, kv_split=("striped",),
                kv_len=ROWS * world + 3).but({"slopes": [0.5] * 4})  # fmt: skip
    one, two = (side.but({"align": align}) for align in ("top_left", "bottom_right"))
    return Disagreement("corner of slopes", one, two, "refused", (0, -3))


@draw
def wanted_gradients(source: random.Random, world: int) -> Disagreement:
    """None on one rank: refused. Others than the peers': whatever they are, nobody waits."""
    side = base(source, world, bias="NSK", attn_mask=None, sink=(0.5,) * 4, q_heads=4, kv_heads=2, seed=1)
    other = source.choice(["", "q", "k", "v", "qkv", "qkvb", "b", "s"])
    words = ("true", "false") if not other else ()
    return Disagreement(f"gradients of {other}", side, side.but({"grads": other}), "either" if other else "refused",
                        words, ("needs_grad", "wants_bias") if not other else ())  # fmt: skip


@draw
def statistics(source: random.Random, world: int) -> Disagreement:
    side = base(source, world)
    return Disagreement("return_stats", side, side.but({"return_stats": True}), "either", (), ())


# Pairs that mean the same.
EQUAL: dict[str, Draw] = {}


def equal(name: str, first: dict, second: dict, **fixed: Any) -> None:
    """Two ways to say the same in `more`; "case ..." keys are fields of the case."""

    def make(source: random.Random, world: int) -> Disagreement:
        side = base(source, world, **fixed)
        sides = []
        for given in (first, second):
            fields = {key[5:]: value for key, value in given.items() if key.startswith("case ")}
            more = {key: value for key, value in given.items() if not key.startswith("case ")}
            more = {key: value(world) if callable(value) else value for key, value in more.items()}
            sides.append(side.but(more, **fields))
        source.shuffle(sides)
        return Disagreement(name, *sides, "equal")

    EQUAL[name] = make


equal("no map, contiguous", {"drop": ("shard_map",)}, {}, split=("contiguous",))
equal("auto, ring", {"schedule": "auto"}, {}, schedule="ring")
equal("auto, all_to_all", {"exchange": "auto"}, {}, exchange="all_to_all", schedule="ring")
equal("a tensor of lengths, a list", {"mask": lambda world: ("lengths", [5, ROWS * world - 5], True)},
      {"mask": lambda world: ("lengths", [5, ROWS * world - 5], False)})  # fmt: skip
equal("no scale, its number", {"case scale": None}, {"case scale": 1 / math.sqrt(8)}, qk_dim=8)
equal("num_heads, none", {"num_heads": 4}, {}, layout="BNSD", q_heads=4, kv_heads=2, sink=None)
equal("a seed as a tensor", {"seed": torch.tensor([7])}, {}, dropout=(0.25, 7, 1))
equal("a mesh, a group", {"as_mesh": True}, {})
equal("strided, dense", {"strided": True}, {}, layout="BNSD")
equal("a bias by its other name", {"bias_as": "attn_mask"}, {"bias_as": "bias"}, bias="NSK", attn_mask=None)
equal("no softcap, left out", {"drop": ("softcap",)}, {}, softcap=None)
equal("total_heads, none", {"total_heads": 4}, {}, dropout=(0.25, 7, 1), q_heads=4, kv_heads=2, sink=None)
equal("numbers of dropout without any", {"seed": 7}, {}, dropout=None)
equal("the map of keys, twice", {"case kv_split": ("striped",)}, {}, split=("striped",))
equal("a list of prefixes, a number", {"mask": ("prefix", [3])}, {"mask": ("prefix", 3)})
equal("float, int", {"scale": 1}, {"scale": 1.0})


def drawn(seed: int, world: int, times: int) -> Iterator[Disagreement]:
    """Every kind so often, each time beside other arguments."""
    for name, make in {**DRAWS, **EQUAL}.items():
        for turn in range(times):
            yield make(random.Random(f"{seed} {world} {name} {turn}"), world)

"""One attention call as plain data, run on this rank through the product and set against the oracle."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracle
import torch

import ringspan as rs

NAMES = ("out", "lse", "dq", "dk", "dv")
CANCELLED = 0.25  # of the terms' size: below this, dq and dk are differences of nearly equal numbers
SUMMED = 0.5  # likewise of a bias, whose gradients are rounded one by one before those of shared elements are added up
PADDING = 1000.0  # what padding rows hold: finite, and visible if it is read


@dataclass(frozen=True)
class Case:
    """Sizes are global; mask and splits are rules of the oracle."""

    mask: tuple = ("causal",)
    split: tuple = ("contiguous",)
    kv_split: tuple | None = None  # None: as `split`
    seq_len: int = 16
    kv_len: int | None = None  # None: as `seq_len`
    batch: int = 1
    q_heads: int = 4
    kv_heads: int = 2
    qk_dim: int = 8
    v_dim: int = 8
    dtype: str = "float32"
    layout: str = "BNSD"
    exchange: str = "auto"
    schedule: str = "auto"
    scale: float | None = None
    seed: int = 0
    lse_grad: bool = False
    sink: tuple[float, ...] | None = None  # one for each query head
    softcap: float | None = None
    # Axes of "BNSK" that the tensor has; the others are shared.
    attn_mask: str | None = None  # bool
    bias: str | None = None  # float, as attn_mask where that is None, else as bias
    squeezed: bool = False  # both without leading axes of size 1
    alibi: tuple[float, ...] | None = None  # one slope for each query head
    dropout: tuple | None = None  # p, seed, offset

    def but(self, **changes: Any) -> Case:
        """This case with other fields."""
        return replace(self, **changes)


@dataclass
class Local:
    """This rank's results in BNSD, and the positions of its rows."""

    out: torch.Tensor
    stats: rs.Stats
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    q_positions: np.ndarray
    kv_positions: np.ndarray
    dsink: torch.Tensor | None = None  # summed over the group
    dbias: torch.Tensor | None = None  # likewise where ranks share its rows


def mask_of(rule: tuple) -> rs.Mask:
    """The product's mask for a rule of the oracle."""
    kind, rest = rule[0], rule[1:]
    if kind in ("and", "or"):
        first, second = mask_of(rest[0]), mask_of(rest[1])
        return first & second if kind == "and" else first | second
    if kind == "ids":
        return rs.documents(ids=rest[0], inside=mask_of(rest[1]) if len(rest) > 1 else None)
    make = {"full": rs.full, "causal": rs.causal, "window": rs.window, "chunked": rs.chunked, "prefix": rs.prefix}
    return rs.bands(rest[0]) if kind == "bands" else make[kind](*rest)


def map_of(split: tuple, seq_len: int, world: int) -> rs.ShardMap:
    """The product's map for a split of the oracle."""
    kind = split[0]
    if kind == "lengths":
        return rs.ShardMap.from_lengths(split[1])
    if kind == "positions":
        segments = [
            [(row, position, 1, 1) for row, position in enumerate(positions) if position >= 0] for positions in split[1]
        ]
        return rs.ShardMap.from_segments(segments, seq_len=seq_len, local_rows=[len(row) for row in split[1]])
    if kind == "entries":
        segments = [
            [[(row, position, 1, 1) for row, position in enumerate(rows) if position >= 0] for rows in entry]
            for entry in split[1]
        ]
        return rs.ShardMap.from_segments(segments, seq_len=seq_len, local_rows=[len(rows) for rows in split[1][0]])
    if kind == "per_document":
        return rs.ShardMap.per_document(split[1], world, seq_len=seq_len)
    if kind == "balanced":
        return rs.ShardMap.balanced(mask_of(split[1]), seq_len, world)
    return getattr(rs.ShardMap, kind)(seq_len, world)


def holdings(split: tuple, seq_len: int, world: int) -> list[np.ndarray]:
    """Global positions of each rank's rows: the oracle's own, or for a map that is found by search, the map's.

    What such a map must fulfil is tested apart (tests/python/test_shard_map.py).
    """
    if split[0] not in ("per_document", "balanced"):
        return oracle.holdings(split, seq_len, world)
    smap = map_of(split, seq_len, world)
    return [smap.positions(rank).numpy() for rank in range(world)]


def to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] as contiguous memory of `layout`."""
    if layout == "BNSD":
        return x.contiguous()
    x = x.transpose(1, 2)
    if layout == "TND":
        return x[0].contiguous()
    if layout != "BSND":
        x = x.flatten(2)
    return (x.transpose(0, 1) if layout == "SBH" else x).contiguous()


def from_layout(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """The inverse of `to_layout`."""
    if layout == "BNSD":
        return x
    if layout == "TND":
        return x.transpose(0, 1)[None]
    x = x.transpose(0, 1) if layout == "SBH" else x
    x = x if layout == "BSND" else x.unflatten(2, (heads, -1))
    return x.transpose(1, 2)


@functools.lru_cache(maxsize=64)
def inputs_of(case: Case) -> list[np.ndarray]:
    """q, k, v, dout and dlse in float64, rounded to the dtype of the case."""
    kv_len = case.seq_len if case.kv_len is None else case.kv_len
    drawn = oracle.draw(
        case.seed, max(case.seq_len, kv_len), case.q_heads, case.kv_heads, (case.qk_dim, case.v_dim), case.batch
    )
    lengths = (case.seq_len, kv_len, kv_len, case.seq_len)
    cut = [array[:, :, :length] for array, length in zip(drawn, lengths, strict=True)]
    dlse = np.random.default_rng(case.seed + 1).standard_normal(cut[0].shape[:3])
    dtype = getattr(torch, case.dtype)
    rounded = [torch.from_numpy(np.ascontiguousarray(array)).to(dtype).double().numpy() for array in cut]
    return [*rounded, dlse.astype(np.float32).astype(np.float64) * case.lse_grad]


def _shape_of(axes: str, case: Case) -> tuple[int, ...]:
    kv_len = case.seq_len if case.kv_len is None else case.kv_len
    sizes = {"B": case.batch, "N": case.q_heads, "S": case.seq_len, "K": kv_len}
    return tuple(sizes[axis] if axis in axes else 1 for axis in "BNSK")


@functools.lru_cache(maxsize=16)
def mask_tensor(case: Case) -> np.ndarray:
    """Bool, global, True = takes part."""
    return np.random.default_rng(case.seed + 2).random(_shape_of(case.attn_mask, case)) > 0.3


@functools.lru_cache(maxsize=16)
def bias_tensor(case: Case) -> np.ndarray:
    """Global, rounded to the dtype of the case; some of it -inf."""
    source = np.random.default_rng(case.seed + 3)
    drawn = source.standard_normal(_shape_of(case.bias, case))
    rounded = torch.from_numpy(drawn).to(getattr(torch, case.dtype)).double().numpy()
    rounded[source.random(rounded.shape) < 0.1] = -np.inf
    return rounded


def pair_terms(case: Case) -> dict[str, Any]:
    """The oracle's arguments for what changes single pairs."""
    kv_len = case.seq_len if case.kv_len is None else case.kv_len
    full = (case.batch, case.q_heads, case.seq_len, kv_len)
    bias = np.zeros(full)
    if case.attn_mask is not None:
        bias = np.where(mask_tensor(case), bias, -np.inf)
    if case.bias is not None:
        bias = bias + bias_tensor(case)
    if case.alibi is not None:
        distance = np.abs(np.arange(kv_len)[None, :] - np.arange(case.seq_len)[:, None])
        bias = bias - np.asarray(case.alibi)[None, :, None, None] * distance
    terms: dict[str, Any] = {"bias": bias, "softcap": case.softcap}
    if case.dropout is not None:
        terms |= {"dropped": oracle.dropped_pairs(*case.dropout, full), "dropout_p": case.dropout[0]}
    return terms


def pair_arguments(case: Case, q_positions: np.ndarray) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The product's arguments for the same on a rank with these rows, and the bias among them."""
    found: dict[str, Any] = {"softcap": case.softcap}
    bias = None

    def own_rows(tensor: np.ndarray, axes: str, padding: float) -> torch.Tensor:
        if "S" in axes:
            tensor = oracle.take_rows(tensor, q_positions)
            fill_padding(tensor, q_positions, padding)
        while case.squeezed and tensor.ndim > 1 and tensor.shape[0] == 1:
            tensor = tensor[0]
        return torch.from_numpy(np.ascontiguousarray(tensor))

    if case.attn_mask is not None:
        found["attn_mask"] = own_rows(mask_tensor(case), case.attn_mask, 1.0).to(torch.bool)
    if case.bias is not None:
        bias = own_rows(bias_tensor(case), case.bias, np.nan).to(getattr(torch, case.dtype)).requires_grad_()
        found["bias" if case.attn_mask is not None or case.seed % 2 else "attn_mask"] = bias
    if case.alibi is not None:
        found["bias"] = rs.alibi(torch.tensor(case.alibi, dtype=torch.float32))
    if case.dropout is not None:
        found |= dict(zip(("dropout_p", "seed", "offset"), case.dropout, strict=True))
    return found, bias


def expect(case: Case, world: int = 1) -> oracle.Result:
    """The right answer, global. Queries that no rank holds give no gradient."""
    q, k, v, dout, dlse = inputs_of(case)
    held = np.concatenate([np.atleast_2d(rows) for rows in holdings(case.split, case.seq_len, world)], axis=1)
    asked = np.stack([np.isin(np.arange(case.seq_len), rows) for rows in held])
    keep = oracle.keep_of(case.mask, q.shape[2], k.shape[2]) & asked[:, :, None]
    dout, dlse = dout * asked[:, None, :, None], dlse * asked[:, None, :]
    return oracle.attend(q, k, v, keep, dout, dlse, scale=case.scale, sink=case.sink, **pair_terms(case))


def positions_of(case: Case, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    """Global positions of this rank's rows of q and of k and v."""
    kv_len = case.seq_len if case.kv_len is None else case.kv_len
    kv_split = case.split if case.kv_split is None else case.kv_split
    return holdings(case.split, case.seq_len, world)[rank], holdings(kv_split, kv_len, world)[rank]


def local_inputs(case: Case, rank: int, world: int) -> list[torch.Tensor]:
    """This rank's q, k, v, dout in BNSD (padding rows filled with large values) and dlse."""
    q_positions, kv_positions = positions_of(case, rank, world)
    dtype = getattr(torch, case.dtype)
    found = []
    for array, where in zip(
        inputs_of(case), (q_positions, kv_positions, kv_positions, q_positions, q_positions), strict=True
    ):
        rows = oracle.take_rows(array, where)
        if array.ndim == 4:
            fill_padding(rows, where, PADDING)
        found.append(torch.from_numpy(rows).to(dtype))
    found[4] = found[4].to(torch.float64 if dtype == torch.float64 else torch.float32)
    return found


def padding_of(array: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The padding rows of [B, N, rows, ...]."""
    if positions.ndim == 1:
        return array[:, :, positions < 0]
    return array.swapaxes(1, 2)[positions < 0]


def fill_padding(array: np.ndarray, positions: np.ndarray, value: float) -> None:
    """Sets the padding rows of [B, N, rows, ...]."""
    if positions.ndim == 1:
        array[:, :, positions < 0] = value
    else:
        array.swapaxes(1, 2)[positions < 0] = value


def run_case(
    case: Case, group: Any, rank: int, world: int, attend: Any = rs.attention, captured: torch.Tensor | None = None
) -> Local:
    """Forward and backward of this rank; `attend` takes and gives what `rs.attention` does.

    captured: a bias that `attend` knows of, in place of the case's; its gradient is summed over the group.
    """
    q, k, v, dout, dlse = local_inputs(case, rank, world)
    kv_len = case.seq_len if case.kv_len is None else case.kv_len
    leaves = [to_layout(x, case.layout).requires_grad_() for x in (q, k, v)]
    sink = None
    if case.sink is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        sink = torch.tensor(case.sink, dtype=wide, requires_grad=True)
        leaves.append(sink)
    positions = positions_of(case, rank, world)
    pairs, bias = pair_arguments(case, positions[0])
    bias = bias if captured is None else captured
    leaves += [] if bias is None else [bias]
    out, stats = attend(
        *leaves[:3],
        mask=mask_of(case.mask),
        shard_map=map_of(case.split, case.seq_len, world),
        kv_shard_map=None if case.kv_split is None else map_of(case.kv_split, kv_len, world),
        group=group,
        layout=case.layout,
        num_heads=case.q_heads if case.layout in ("BSH", "SBH") else None,
        scale=case.scale,
        exchange=case.exchange,
        schedule=case.schedule,
        sink=sink,
        return_stats=True,
        **pairs,
    )
    if case.layout == "TND":
        stats = rs.Stats(*(one.transpose(0, 1)[None] for one in stats))
    results, grads = [out], [to_layout(dout, case.layout)]
    if case.lse_grad:
        results, grads = [out, stats.lse], [*grads, dlse]
    gradients = list(torch.autograd.grad(results, leaves, grads))
    dbias = gradients.pop() if bias is not None else None
    dsink = gradients.pop() if sink is not None else None
    is_own = captured is None and "S" in (case.bias or "")
    # In double: parts are rounded already, their sum need not be.
    dsink = None if dsink is None else _summed(dsink.double(), group)
    dbias = None if dbias is None else _summed(dbias.double(), None if is_own else group)
    heads = (case.q_heads, case.kv_heads, case.kv_heads)
    bnsd = [from_layout(x, case.layout, count) for x, count in zip(gradients, heads, strict=True)]
    out = from_layout(out.detach(), case.layout, case.q_heads)
    return Local(out, stats, *bnsd, *positions, dsink, dbias)


def _summed(part: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None:
        torch.distributed.all_reduce(part, group=group)
    return part


def errors_of(case: Case, group: Any, rank: int, world: int) -> dict[str, float]:
    """Largest error of each result on this rank, relative to the largest value of the whole reference.

    Where a tiny sequence makes nearly all terms of dq and dk cancel, relative to a quarter of these terms. inf where
    padding or an empty row is not exactly as promised.
    """
    return compare(case, run_case(case, group, rank, world), expect(case, world))


def compare(case: Case, local: Local, expected: oracle.Result) -> dict[str, float]:
    """See `errors_of`. dsink and dbias are summed over ranks that share them."""
    pairs = {
        "out": (local.out, expected.out, local.q_positions),
        "lse": (local.stats.lse, expected.lse, local.q_positions),
        "dq": (local.dq, expected.dq, local.q_positions),
        "dk": (local.dk, expected.dk, local.kv_positions),
        "dv": (local.dv, expected.dv, local.kv_positions),
    }
    found = {}
    for name, (got, right, positions) in pairs.items():
        rows = oracle.take_rows(right, positions)
        if name == "lse":
            fill_padding(rows, positions, -np.inf)
        value = got.detach().double().numpy()
        same = value.shape == rows.shape and np.array_equal(padding_of(value, positions), padding_of(rows, positions))
        floor = {"dq": expected.dq_terms, "dk": expected.dk_terms}.get(name, 0.0) * CANCELLED
        found[name] = oracle.error(value, rows, right, floor) if same else np.inf
    if local.dsink is not None:
        floor = expected.dsink_terms * CANCELLED
        found["dsink"] = oracle.error(local.dsink.double().numpy(), expected.dsink, expected.dsink, floor)
    if local.dbias is not None:
        found["dbias"] = bias_error(case, local, expected)
    return found


def bias_error(case: Case, local: Local, expected: oracle.Result) -> float:
    """Of this rank's rows, or of the whole where ranks share rows."""
    # Rows that differ between entries make the tensor that a rank gives do so too.
    axes = case.bias + "B" if local.q_positions.ndim == 2 and "S" in case.bias else case.bias
    shared = tuple(place for place, axis in enumerate("BNSK") if axis not in axes)
    right = rows = expected.dbias.sum(axis=shared, keepdims=True)
    if "S" in case.bias:
        rows = oracle.take_rows(right, local.q_positions)
    terms = np.abs(expected.dbias).sum(axis=shared).max(initial=expected.dq_terms)  # a row's gradients add up to 0
    got = local.dbias.double().numpy()
    got = got.reshape(rows.shape) if case.squeezed and got.size == rows.size else got
    cancelled = expected.dbias_terms.sum(axis=shared).max(initial=0.0)
    return oracle.error(got, rows, right, max(terms * SUMMED, cancelled * CANCELLED))


def squared_errors_of(case: Case, group: Any, rank: int, world: int) -> dict[str, tuple[float, int]]:
    """Sum of squared errors and number of elements of each result on this rank."""
    local, expected = run_case(case, group, rank, world), expect(case, world)
    found = {}
    for name in NAMES:
        got = (local.stats.lse if name == "lse" else getattr(local, name)).detach().double().numpy()
        positions = local.q_positions if name in ("out", "lse", "dq") else local.kv_positions
        rows = oracle.take_rows(getattr(expected, name), positions)
        where = np.isfinite(rows)
        found[name] = float(((got[where] - rows[where]) ** 2).sum()), int(where.sum())
    return found

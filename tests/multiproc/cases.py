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
    scale: float | None = None
    seed: int = 0
    lse_grad: bool = False
    sink: tuple[float, ...] | None = None  # one for each query head

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
    if layout != "BSND":
        x = x.flatten(2)
    return (x.transpose(0, 1) if layout == "SBH" else x).contiguous()


def from_layout(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """The inverse of `to_layout`."""
    if layout == "BNSD":
        return x
    x = x.transpose(0, 1) if layout == "SBH" else x
    x = x if layout == "BSND" else x.unflatten(2, (heads, -1))
    return x.transpose(1, 2)


@functools.lru_cache(maxsize=64)
def inputs_of(case: Case) -> list[np.ndarray]:
    """q, k, v, dout and dlse in float64, rounded to the dtype of the case."""
    kv_len = case.seq_len if case.kv_len is None else case.kv_len
    drawn = oracle.draw(
        case.seed, max(case.seq_len, kv_len), case.q_heads, case.kv_heads, case.qk_dim, case.v_dim, case.batch
    )
    lengths = (case.seq_len, kv_len, kv_len, case.seq_len)
    cut = [array[:, :, :length] for array, length in zip(drawn, lengths, strict=True)]
    dlse = np.random.default_rng(case.seed + 1).standard_normal(cut[0].shape[:3])
    dtype = getattr(torch, case.dtype)
    rounded = [torch.from_numpy(np.ascontiguousarray(array)).to(dtype).double().numpy() for array in cut]
    return [*rounded, dlse.astype(np.float32).astype(np.float64) * case.lse_grad]


def expect(case: Case, world: int = 1) -> oracle.Result:
    """The right answer, global. Queries that no rank holds give no gradient."""
    q, k, v, dout, dlse = inputs_of(case)
    held = np.concatenate(holdings(case.split, case.seq_len, world))
    asked = np.isin(np.arange(case.seq_len), held)
    keep = oracle.keep_of(case.mask, q.shape[2], k.shape[2]) & asked[None, :, None]
    dout, dlse = dout * asked[None, None, :, None], dlse * asked
    return oracle.attend(q, k, v, keep, dout, dlse, case.scale, case.sink)


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
            rows[:, :, where < 0] = PADDING
        found.append(torch.from_numpy(rows).to(dtype))
    found[4] = found[4].to(torch.float64 if dtype == torch.float64 else torch.float32)
    return found


def run_case(case: Case, group: Any, rank: int, world: int) -> Local:
    """Forward and backward of this rank."""
    q, k, v, dout, dlse = local_inputs(case, rank, world)
    kv_len = case.seq_len if case.kv_len is None else case.kv_len
    leaves = [to_layout(x, case.layout).requires_grad_() for x in (q, k, v)]
    sink = None
    if case.sink is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        sink = torch.tensor(case.sink, dtype=wide, requires_grad=True)
        leaves.append(sink)
    out, stats = rs.attention(
        *leaves[:3],
        mask=mask_of(case.mask),
        shard_map=map_of(case.split, case.seq_len, world),
        kv_shard_map=None if case.kv_split is None else map_of(case.kv_split, kv_len, world),
        group=group,
        layout=case.layout,
        num_heads=case.q_heads if case.layout in ("BSH", "SBH") else None,
        scale=case.scale,
        exchange=case.exchange,
        sink=sink,
        return_stats=True,
    )
    results, grads = [out], [to_layout(dout, case.layout)]
    if case.lse_grad:
        results, grads = [out, stats.lse], [*grads, dlse]
    *gradients, dsink = [*torch.autograd.grad(results, leaves, grads), None][:4]
    if dsink is not None and group is not None:
        torch.distributed.all_reduce(dsink, group=group)
    heads = (case.q_heads, case.kv_heads, case.kv_heads)
    bnsd = [from_layout(x, case.layout, count) for x, count in zip(gradients, heads, strict=True)]
    out = from_layout(out.detach(), case.layout, case.q_heads)
    return Local(out, stats, *bnsd, *positions_of(case, rank, world), dsink)


def errors_of(case: Case, group: Any, rank: int, world: int) -> dict[str, float]:
    """Largest error of each result on this rank, relative to the largest value of the whole reference.

    Where a tiny sequence makes nearly all terms of dq and dk cancel, relative to a quarter of these terms. inf where
    padding or an empty row is not exactly as promised.
    """
    local, expected = run_case(case, group, rank, world), expect(case, world)
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
            rows[:, :, positions < 0] = -np.inf
        value = got.detach().double().numpy()
        same = value.shape == rows.shape and np.array_equal(value[:, :, positions < 0], rows[:, :, positions < 0])
        floor = {"dq": expected.dq_terms, "dk": expected.dk_terms}.get(name, 0.0) * CANCELLED
        found[name] = oracle.error(value, rows, right, floor) if same else np.inf
    if local.dsink is not None:
        floor = expected.dsink_terms * CANCELLED
        found["dsink"] = oracle.error(local.dsink.double().numpy(), expected.dsink, expected.dsink, floor)
    return found


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

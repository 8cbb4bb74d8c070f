"""The judge: dense attention in float64 by NumPy. Shares no code with the product.

Arrays are [B, N, S, D] in global order. `keep` is bool [B or 1, Sq, Skv]; a row that keeps nothing has out 0,
lse -inf and gradients 0. Query head h uses KV head h // (N / Nkv).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class Result:
    """What attention gives: forward, and gradients where `dout` was given.

    `dq_terms`, `dk_terms` and `dsink_terms` are the largest sums of absolute terms behind a value of each: where the
    terms cancel (a row with one key has dq 0), rounding errors are relative to these.
    """

    out: Array
    lse: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dq_terms: float = 0.0
    dk_terms: float = 0.0
    dsink: Array | None = None
    dsink_terms: float = 0.0
    dbias: Array | None = None  # [B, N, Sq, Skv]
    dbias_terms: Array | None = None  # likewise: the absolute terms behind each


def draw(seed: int, seq_len: int, q_heads: int, kv_heads: int, dims: int | tuple[int, int], batch: int = 1) -> list:
    """q, k, v, dout: standard normal, drawn in this order as [B, S, N, D], returned as [B, N, S, D].

    dims: of q and k, and of v and dout; one number where they are alike.
    """
    qk_dim, v_dim = (dims, dims) if isinstance(dims, int) else dims
    generator = np.random.default_rng(seed)
    shapes = [(q_heads, qk_dim), (kv_heads, qk_dim), (kv_heads, v_dim), (q_heads, v_dim)]
    drawn = [generator.standard_normal((batch, seq_len, heads, dim)) for heads, dim in shapes]
    return [np.ascontiguousarray(array.transpose(0, 2, 1, 3)) for array in drawn]


@dataclass(frozen=True)
class Terms:
    """What changes scores and weights.

    `sink`, one number per query head, is one more key for every row: that score, and a value of 0. Scores become
    softcap * tanh(score / softcap), then `bias` [B, N, Sq, Skv] is added, whose -inf masks. Pairs that are `dropped`
    (bool, likewise) weigh 0 where they meet v, the others 1 / (1 - dropout_p).
    """

    scale: float | None = None
    sink: Array | None = None
    softcap: float | None = None
    bias: Array | None = None
    dropped: Array | None = None
    dropout_p: float = 0.0


def attend(
    q: Array, k: Array, v: Array, keep: Array, dout: Array | None = None, dlse: Array | None = None, **terms: Any
) -> Result:
    """Forward, and backward for the gradients `dout` of out and `dlse` of lse; `terms`: those of `Terms`, by name."""
    given = Terms(**terms)
    sink, softcap = given.sink, given.softcap
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if given.scale is None else given.scale
    wide_k, wide_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    score = scale * (q @ wide_k.swapaxes(-1, -2))
    steep = np.ones_like(score)  # d capped / d score
    if softcap is not None:
        steep = 1 - np.tanh(score / softcap) ** 2
        score = softcap * np.tanh(score / softcap)
    if given.bias is not None:
        score = score + given.bias
    score = np.where(keep[:, None], score, -np.inf)
    factor = np.ones_like(score) if given.dropped is None else np.where(given.dropped, 0.0, 1 / (1 - given.dropout_p))
    if sink is not None:
        column = np.broadcast_to(np.asarray(sink, dtype=float)[None, :, None, None], (*score.shape[:3], 1))
        score = np.concatenate([score, column], axis=-1)
        none = [np.zeros((*wide.shape[:2], 1, wide.shape[3])) for wide in (wide_k, wide_v)]
        wide_k, wide_v = (np.concatenate(pair, axis=2) for pair in zip((wide_k, wide_v), none, strict=True))
        factor = np.concatenate([factor, np.ones_like(column)], axis=-1)
    peak = score.max(axis=-1, keepdims=True, initial=-np.inf)
    peak = np.where(np.isfinite(peak), peak, 0.0)
    weight = np.exp(score - peak)
    total = weight.sum(axis=-1, keepdims=True)
    probability = np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + peak)[..., 0]
    result = Result((probability * factor) @ wide_v, lse)
    if dout is None:
        return result
    delta = (dout * result.out).sum(-1, keepdims=True)
    slope = factor * (dout @ wide_v.swapaxes(-1, -2)) - delta
    terms = probability * scale * (factor * (np.abs(dout) @ np.abs(wide_v).swapaxes(-1, -2)) + np.abs(delta))
    if dlse is not None:
        slope = slope + dlse[..., None]
    dscore = probability * slope * scale
    if sink is not None:
        result.dsink = (probability * slope)[..., -1].sum((0, 2))
        size = (np.abs(dout) * np.abs(result.out)).sum(-1) + (0.0 if dlse is None else np.abs(dlse))
        result.dsink_terms = float((probability[..., -1] * size).sum((0, 2)).max(initial=0.0))
        dscore, probability, terms, wide_k = dscore[..., :-1], probability[..., :-1], terms[..., :-1], wide_k[:, :, :-1]
        factor = factor[..., :-1]
    result.dbias, result.dbias_terms = dscore / scale, np.abs(terms) / abs(scale)
    dscore = dscore * steep
    result.dq = dscore @ wide_k
    result.dk = _sum_groups(dscore.swapaxes(-1, -2) @ q, group)
    result.dv = _sum_groups((probability * factor).swapaxes(-1, -2) @ dout, group)
    result.dq_terms = float((np.abs(terms) @ np.abs(wide_k)).max(initial=0.0))
    result.dk_terms = float(_sum_groups(np.abs(terms).swapaxes(-1, -2) @ np.abs(q), group).max(initial=0.0))
    return result


def philox(counter: Array, key: tuple[int, int]) -> Array:
    """Philox4x32-10 of counters uint32 [n, 4] (Salmon and others 2011)."""
    words = [counter[:, i].astype(np.uint64) for i in range(4)]
    low = np.uint64(0xFFFFFFFF)
    first, second = key
    for _ in range(10):
        product = [np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]]
        words = [
            (product[1] >> np.uint64(32)) ^ words[1] ^ np.uint64(first),
            product[1] & low,
            (product[0] >> np.uint64(32)) ^ words[3] ^ np.uint64(second),
            product[0] & low,
        ]
        first, second = (first + 0x9E3779B9) % 2**32, (second + 0xBB67AE85) % 2**32
    return np.stack(words, axis=1).astype(np.uint32)


def dropped_pairs(p: float, seed: int, offset: int, shape: tuple[int, int, int, int], first: int = 0) -> Array:
    """Which pairs of a call of [B, N, Sq, Skv] dropout drops, as docs/dropout.md says. `first`: index of the first."""
    index = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(first)
    group = index // np.uint64(4)
    offset, seed = offset % 2**64, seed % 2**64
    counter = np.empty((len(index), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = offset % 2**32, offset // 2**32
    counter[:, 2], counter[:, 3] = group % np.uint64(2**32), group // np.uint64(2**32)
    draws = philox(counter, (seed % 2**32, seed // 2**32))[np.arange(len(index)), (index % np.uint64(4)).astype(int)]
    threshold = min((2**24 - round(p * 2**24)) * 2**8, 2**32 - 1)
    return (draws >= threshold).reshape(shape)


def _sum_groups(array: Array, group: int) -> Array:
    batch, heads, rows, dim = array.shape
    return array.reshape(batch, heads // group, group, rows, dim).sum(2)


def keep_of(rule: tuple, q_len: int, kv_len: int) -> Array:
    """The bool matrix [B or 1, Sq, Skv] of a mask rule, pair by pair as the documentation defines it.

    Rules: ("full",), ("causal", corner), ("window", left, right, corner), ("chunked", size), ("prefix", lengths),
    ("ids", ids or rows of ids, inside rule), ("bands", rows), ("and", rule, rule), ("or", rule, rule). Corner and
    inside may be left out: top left, causal. None as a window's side is open.
    """
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    kind, rest = rule[0], rule[1:]
    if kind in ("and", "or"):
        first, second = (keep_of(part, q_len, kv_len) for part in rest)
        return first & second if kind == "and" else first | second
    if kind == "full":
        return np.ones((1, q_len, kv_len), bool)
    if kind == "causal":
        shift = kv_len - q_len if rest[:1] == ("bottom_right",) else 0
        return (j <= i + shift)[None]
    if kind == "window":
        shift = kv_len - q_len if rest[2:3] == ("bottom_right",) else 0
        left, right = (np.inf if side is None else side for side in rest[:2])
        return ((i + shift - left <= j) & (j <= i + shift + right))[None]
    if kind == "chunked":
        return ((i // rest[0] == j // rest[0]) & (j <= i))[None]
    if kind == "prefix":
        return np.stack([(j <= i) | (j < length) for length in rest[0]])
    if kind == "bands":
        keep = np.zeros((q_len, kv_len), bool)
        for q0, q1, k0, k1, lo, hi in rest[0]:
            low, high = -np.inf if lo is None else lo, np.inf if hi is None else hi
            keep |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (low <= j - i) & (j - i <= high)
        return keep[None]
    rows = np.atleast_2d(np.asarray(rest[0]))
    return np.stack([_documents(row, rest[1] if len(rest) > 1 else ("causal",)) for row in rows])


def _documents(ids: Array, inside: tuple) -> Array:
    keep = np.zeros((len(ids), len(ids)), bool)
    for document in set(ids.tolist()) - {0}:
        where = np.flatnonzero(ids == document)
        keep[np.ix_(where, where)] = keep_of(inside, len(where), len(where))[0]
    return keep


def holdings(split: tuple, seq_len: int, world: int) -> list[Array]:
    """Global positions of each rank's rows (-1 = padding).

    Splits: ("contiguous",), ("head_tail",), ("striped",), ("lengths", lengths), ("positions", rows of positions), and
    ("entries", rows of positions for each batch entry), which gives [B, rows] for each rank.
    """
    kind, everything = split[0], np.arange(seq_len)
    if kind == "entries":
        return [
            np.asarray(entries, dtype=np.int64).reshape(len(split[1]), -1) for entries in zip(*split[1], strict=True)
        ]
    if kind == "positions":
        return [np.asarray(row, dtype=np.int64) for row in split[1]]
    if kind == "striped":
        return [everything[everything % world == rank] for rank in range(world)]
    if kind == "lengths":
        return np.split(everything, np.cumsum(split[1])[:-1])
    count = world if kind == "contiguous" else 2 * world
    chunks = np.split(everything, [index * seq_len // count for index in range(1, count)])
    if kind == "contiguous":
        return chunks
    return [np.concatenate([chunks[rank], chunks[2 * world - 1 - rank]]) for rank in range(world)]


def take_rows(array: Array, positions: Array, axis: int = 2) -> Array:
    """Rows of `array` at global positions, which may be [B, rows]; padding rows are 0."""
    if positions.ndim == 2:
        entries = np.broadcast_to(array, (len(positions), *array.shape[1:]))
        return np.stack([take_rows(one, where, axis - 1) for one, where in zip(entries, positions, strict=True)])
    shape = list(array.shape)
    shape[axis] = len(positions)
    picked = np.moveaxis(np.zeros(shape), axis, 0)
    picked[positions >= 0] = np.moveaxis(array, axis, 0)[positions[positions >= 0]]
    return np.moveaxis(picked, 0, axis)


def error(got: Array, expected: Array, reference: Array | None = None, floor: float = 0.0) -> float:
    """Largest difference over the largest finite value of the reference, at least `floor`.

    inf where infinities, nan or shapes differ.
    """
    reference = expected if reference is None else reference
    got, finite = np.asarray(got, np.float64), np.isfinite(expected)
    if got.shape != expected.shape or not np.array_equal(got[~finite], expected[~finite]):
        return np.inf
    difference = np.abs(got[finite] - expected[finite]).max(initial=0.0)
    if not np.isfinite(difference):
        return np.inf
    known = np.abs(reference[np.isfinite(reference)]).max(initial=floor)
    return float(difference) if known == 0 else float(difference / known)


def rms(values: Sequence[Array]) -> float:
    """Root mean square of all elements."""
    flat = np.concatenate([np.asarray(value, np.float64).ravel() for value in values])
    return float(np.sqrt(np.mean(flat**2)))

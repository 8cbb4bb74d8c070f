"""Jobs of the pool for the user cases that need more than an oracle comparison."""

from __future__ import annotations

import math

import numpy as np
import oracle
import torch
import torch.distributed as dist
from cases import Case, expect, inputs_of, map_of

import ringspan as rs

EXCHANGES = ("all_to_all", "all_gather", "p2p")


def place_of(group: dist.ProcessGroup) -> tuple[int, int]:
    """Rank in the group, and its size."""
    return dist.get_rank(group), dist.get_world_size(group)


def odd_lengths(group: dist.ProcessGroup) -> float:
    """Constant tokens, ones then twos, for each length 1..17: the answer has a closed form. The largest error.

    Three ways to hold them: unequal shards; equal shards with padding rows of 200; padding tokens of 200 by ids.
    """
    rank, world = place_of(group)
    worst = 0.0
    for length in range(1, 18):
        tokens = np.repeat([1.0, 2.0], [length // 2 + 1, length - length // 2 - 1])
        ones, twos = (tokens == 1).sum(), (tokens == 2).sum()
        factor = np.exp(8 * tokens / math.sqrt(8))  # weight of a two over that of a one
        right = (ones + 2 * twos * factor) / (ones + twos * factor)
        if length == 7:
            assert abs(right[0] - 1.92695) < 1e-5
            assert abs(right[6] - 1.99536) < 1e-5
        for rows in (0, -(-length // world), -(-length // world) + 1):
            worst = max(worst, _constant_tokens(tokens, right, rows, group, rank, world))
        worst = max(worst, _padding_tokens(tokens, right, group, rank, world))
    return worst


def _constant_tokens(
    tokens: np.ndarray, right: np.ndarray, rows: int, group: dist.ProcessGroup, rank: int, world: int
) -> float:
    """Contiguous shards; with `rows`, each rank has that many, and what follows the last token is padding."""
    if rows == 0:
        smap = rs.ShardMap.contiguous(len(tokens), world)
        held = oracle.holdings(("contiguous",), len(tokens), world)[rank]
    else:
        padded = np.where(np.arange(rows * world) < len(tokens), np.arange(rows * world), -1).reshape(world, rows)
        smap = map_of(("positions", tuple(map(tuple, padded.tolist()))), len(tokens), world)
        held = padded[rank]
    values = np.where(held >= 0, tokens[np.maximum(held, 0)], 200.0)
    expected = np.where(held >= 0, right[np.maximum(held, 0)], 0.0)
    x = torch.tensor(values, dtype=torch.float32)[None, None, :, None].expand(1, 1, -1, 8).contiguous()
    out = rs.attention(x, x, x, shard_map=smap, group=group)
    return float(np.abs(out[0, 0].double().numpy() - expected[:, None]).max(initial=0.0))


def _padding_tokens(tokens: np.ndarray, right: np.ndarray, group: dist.ProcessGroup, rank: int, world: int) -> float:
    total = len(tokens) + 3
    ids = [1] * len(tokens) + [0] * 3
    held = oracle.holdings(("contiguous",), total, world)[rank]
    values, answers = np.concatenate([tokens, [200.0] * 3]), np.concatenate([right, [0.0] * 3])
    x = torch.tensor(values[held], dtype=torch.float32)[None, None, :, None].expand(1, 1, -1, 8).contiguous()
    smap = rs.ShardMap.contiguous(total, world)
    out = rs.attention(x, x, x, mask=rs.documents(ids=ids, inside=rs.full()), shard_map=smap, group=group)
    return float(np.abs(out[0, 0].double().numpy() - answers[held][:, None]).max(initial=0.0))


def short_documents(group: dist.ProcessGroup, dtype: str) -> list[bool]:
    """Documents by lengths, with empty ones, against the same documents by ids: equal bits. One rank may be empty."""
    rank, world = place_of(group)
    found = []
    for lengths in ([3, 0, 5], [1, 1, 1], [0, 0, 2], [8]):
        seq_len = sum(lengths)
        ids = [1 + index for index, length in enumerate(lengths) for _ in range(length)]
        q, k, v, _ = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in oracle.draw(3, seq_len, 4, 2, 8))
        smap = rs.ShardMap.from_lengths([seq_len] + [0] * (world - 1))
        local = [smap.shard(x, rank, 2) for x in (q, k, v)]
        results = [
            rs.attention(*local, mask=mask, shard_map=smap, group=group)
            for mask in (rs.documents(lengths=lengths), rs.documents(ids=ids))
        ]
        found.append(torch.equal(*results) and bool(torch.isfinite(results[0]).all()))
    return found


def far_apart_scores(group: dist.ProcessGroup, dtype: str, rows: int) -> dict[str, float]:
    """Scores 0 on one shard of `rows` and +-120 on the other, in both orders, and one side masked."""
    rank, world = place_of(group)
    values = np.random.default_rng(5).standard_normal((2 * rows, 1, 16))
    worst = {"out": 0.0, "lse": 0.0, "one_side_empty": 0.0, "finite_gradients": True}
    smap = rs.ShardMap.contiguous(2 * rows, world)
    halves = [slice(0, rows), slice(rows, 2 * rows)]
    v = torch.from_numpy(values).permute(1, 0, 2)[None].to(getattr(torch, dtype))
    for height in (30.0, -30.0):
        for high in (0, 1):
            k = torch.zeros_like(v)
            k[:, :, halves[high]] = height
            winner = high if height > 0 else 1 - high
            lse = (120 if height > 0 else 0) + math.log(rows)
            mean = [v[:, :, half].double().mean(2, keepdim=True) for half in halves]
            local = [smap.shard(x, rank, 2).requires_grad_() for x in (torch.ones_like(v), k, v)]
            out, stats = rs.attention(*local, shard_map=smap, group=group, return_stats=True)
            worst["out"] = max(worst["out"], float((out.double() - mean[winner]).abs().max()))
            worst["lse"] = max(worst["lse"], float((stats.lse.double() - lse).abs().max()) / abs(lse))
            grads = torch.autograd.grad(out.sum(), local)
            worst["finite_gradients"] &= all(bool(torch.isfinite(grad).all()) for grad in grads)
            for half in (0, 1):
                only = rs.bands([(0, 2 * rows, rows * half, rows * (half + 1), None, None)])
                out = rs.attention(*local, mask=only, shard_map=smap, group=group)
                worst["one_side_empty"] = max(worst["one_side_empty"], float((out.double() - mean[half]).abs().max()))
            nothing = rs.attention(*local, mask=rs.bands([]), shard_map=smap, group=group)
            worst["finite_gradients"] &= bool((nothing == 0).all())
    return worst


def parts_below_half_an_ulp(group: dist.ProcessGroup, dtype: str, exchange: str, rows: int) -> dict[str, bool]:
    """Which results have the right bits where each rank's part of a sum looks like 1, or like little, in 16 bits.

    With u half the distance from 1 to the next number of the dtype, a column of each result adds up 1 + 0.75u of one
    rank and 0.75u of the next. That rounds to 1 + 2u; with a part rounded before it is added, wherever, it gives 1.
    All scores are 0, so that each weight is 1 over a power of two, and exact: what q and k hold meets zeros, and so do
    the values that out adds up (dout is 0 there) and those that dout meets (+-1 by turns, so that out is 0 there).

        q = [ones | 0]    k = [0 | +-sum]    v = [sum | +-1]    dout = [0 | sum]
    """
    rank, world = place_of(group)
    seq_len, u = rows * world, 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    first = torch.arange(world) * rows  # of each rank
    column, behind = torch.arange(world), torch.arange(world).roll(-1)
    parts = torch.zeros(seq_len, world, dtype=torch.float64)
    parts[first, column], parts[first + 1, column], parts[first[behind] + 2, column] = 1.0, 0.75 * u, 0.75 * u
    nothing, turns = torch.zeros_like(parts), torch.ones(seq_len, 1, dtype=torch.float64)
    turns[1::2] = -1
    q = torch.cat([(parts > 0).double(), nothing], 1)
    k = torch.cat([nothing, parts * turns], 1)
    v = torch.cat([parts * seq_len, turns.expand(-1, world)], 1)
    dout = torch.cat([nothing, parts * seq_len], 1)
    right = oracle.attend(*(x[None, None].numpy() for x in (q, k, v)), np.ones((1, seq_len, seq_len), bool),
                          dout[None, None].numpy(), scale=1.0)  # fmt: skip
    smap = rs.ShardMap.contiguous(seq_len, world)
    to_dtype = getattr(torch, dtype)
    local = [smap.shard(x[None, None].to(to_dtype), rank, 2).requires_grad_() for x in (q, k, v)]
    out = rs.attention(*local, shard_map=smap, group=group, exchange=exchange, scale=1.0)
    grads = torch.autograd.grad(out, local, smap.shard(dout[None, None].to(to_dtype), rank, 2))
    wanted = {name: torch.from_numpy(getattr(right, name)).to(to_dtype) for name in ("out", "dq", "dk", "dv")}
    assert (wanted["dv"][..., world:] == 1 + 2 * u).all()
    return {
        name: torch.equal(got.detach(), smap.shard(wanted[name], rank, 2))
        for name, got in zip(wanted, (out, *grads), strict=True)
    }


def rms_of_pytorch(group: dist.ProcessGroup, case: Case) -> dict[str, float]:
    """RMS error of PyTorch's own CPU attention, forward and backward, on the inputs of the case."""
    expected = expect(case)
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (torch.from_numpy(x).to(dtype) for x in inputs_of(case)[:4])
    causal = case.mask == ("causal",)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(dout, q, k, v, out, lse, 0.0, causal)
    results = zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)
    return {name: oracle.rms([got.double().numpy() - getattr(expected, name)]) for name, got in results}


def remote_key_matters(group: dist.ProcessGroup, exchange: str) -> bool:
    """dq changes when only another rank's keys do, along an axis that no query has: out and lse keep their bits.

    Keys that forward sees would not do: they reach a backward that forgets them through out and lse.
    """
    rank, world = place_of(group)
    q, k, v, dout = (torch.from_numpy(x).float() for x in oracle.draw(7, 16, 2, 2, 8))
    q[..., 0] = 0
    smap = rs.ShardMap.contiguous(16, world)
    changed = True
    for other in range(world):
        moved = k.clone()
        held = smap.positions(other)
        moved[:, :, held, 0] += 0.5 * torch.randn(1, 2, len(held), generator=torch.Generator().manual_seed(1))
        found = []
        for keys in (k, moved):
            local = [smap.shard(x, rank, 2).requires_grad_() for x in (q, keys, v)]
            out, stats = rs.attention(*local, shard_map=smap, group=group, exchange=exchange, return_stats=True)
            (dq,) = torch.autograd.grad(out, local[:1], smap.shard(dout, rank, 2))
            found.append([out, stats.lse, dq])
        same = [torch.equal(before, after) for before, after in zip(*found, strict=True)]
        changed &= same == [True, True, False]
    return changed


def other_document_is_unseen(group: dist.ProcessGroup) -> bool:
    """Other values in document 1 leave every bit of the output elsewhere as it was, and change document 1."""
    rank, world = place_of(group)
    q, k, v, _ = (torch.from_numpy(x).float() for x in oracle.draw(8, 16, 2, 1, 8))
    moved = v.clone()
    moved[:, :, :3] += 1
    smap = rs.ShardMap.contiguous(16, world)
    mask = rs.documents(lengths=[3, 5, 2, 6])
    first, second = (
        rs.attention(*(smap.shard(x, rank, 2) for x in (q, k, values)), mask=mask, shard_map=smap, group=group)
        for values in (v, moved)
    )
    inside = smap.positions(rank) < 3
    kept = torch.equal(first[:, :, ~inside], second[:, :, ~inside])
    return kept and bool((first[:, :, inside] != second[:, :, inside]).all())


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, base 10000, pairs (d, d + D/2)."""
    half = x.shape[-1] // 2
    angle = positions[:, None].to(x.dtype) * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


def rope_round_trip(group: dist.ProcessGroup, split: str) -> float:
    """shard, rotate by the map's positions, attend, unshard: relative error against the unsplit computation."""
    rank, world = place_of(group)
    q, k, v, _ = (torch.from_numpy(x) for x in oracle.draw(10, 16, 4, 4, 8))
    everywhere = torch.arange(16)
    whole = oracle.attend(
        rotate(q, everywhere).numpy(),
        rotate(k, everywhere).numpy(),
        v.numpy(),
        oracle.keep_of(("causal",), 16, 16),
    )
    smap = map_of((split,), 16, world)
    local_q, local_k, local_v = (smap.shard(x.float(), rank, 2) for x in (q, k, v))
    held = smap.positions(rank)
    out = rs.attention(
        rotate(local_q, held), rotate(local_k, held), local_v, mask=rs.causal(), shard_map=smap, group=group
    )
    return oracle.error(smap.unshard(out, group=group, dim=2).double().numpy(), whole.out)


def round_trips(group: dist.ProcessGroup) -> bool:
    """unshard(shard(x)) has the bits of x, for every constructor and length, along any dim."""
    rank, world = place_of(group)
    same = True
    for seq_len in (0, 1, 2, 3, 7, 16, 29):
        splits = [("contiguous",), ("head_tail",), ("striped",), ("lengths", (0,) * (world - 1) + (seq_len,))]
        order = np.random.default_rng(seq_len).permutation(seq_len).tolist()
        splits.append(("positions", tuple((-1, *order[place::world], -1, -1) for place in range(world))))
        for split in splits:
            smap = map_of(split, seq_len, world)
            x = torch.arange(float(seq_len * 6)).reshape(2, seq_len, 3)
            for dim in (1, -2):
                same &= torch.equal(smap.unshard(smap.shard(x, rank, dim), group=group, dim=dim), x)
            held = oracle.holdings(split, seq_len, world)[rank]
            same &= smap.positions(rank).tolist() == held.tolist()
            same &= np.array_equal(smap.shard(x, rank, 1).numpy(), oracle.take_rows(x.numpy(), held, 1))
    return same


def prime_length(group: dist.ProcessGroup, split: str) -> float:
    """8423 tokens, tiny heads: out of a sample of rows, and dv of one row's gradient, against the oracle."""
    rank, world = place_of(group)
    q, k, v, dout = oracle.draw(19, 8423, 2, 1, 4)
    smap = map_of((split,), 8423, world)
    local = [smap.shard(torch.from_numpy(x).float(), rank, 2).requires_grad_() for x in (q, k, v)]
    out = rs.attention(*local, mask=rs.causal(), shard_map=smap, group=group)
    held = oracle.holdings((split,), 8423, world)[rank]
    sample = np.linspace(0, len(held) - 1, 40).astype(int)
    rows = held[sample]
    keep = (np.arange(8423)[None, :] <= rows[:, None])[None]
    right = oracle.attend(q[:, :, rows], k, v, keep)
    worst = oracle.error(out[:, :, sample].detach().double().numpy(), right.out)
    # A gradient in one row only keeps the oracle's backward small, and reaches every key before that row.
    target = np.zeros_like(dout)
    target[:, :, 4211] = dout[:, :, 4211]
    (dv,) = torch.autograd.grad(out, local[2:], smap.shard(torch.from_numpy(target).float(), rank, 2))
    right = oracle.attend(q[:, :, 4211:4212], k, v, (np.arange(8423) <= 4211)[None, None], dout[:, :, 4211:4212])
    return max(worst, oracle.error(dv.double().numpy(), right.dv[:, :, held], right.dv))


def striped_work(group: dist.ProcessGroup) -> list[int]:
    """Kept pairs per rank of 16 causal positions dealt out to 4 ranks."""
    return rs.ShardMap.striped(16, 4).work(rs.causal())

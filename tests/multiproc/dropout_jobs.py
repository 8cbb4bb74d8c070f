"""Jobs of the pool about dropout: case A15, seeds, and ranks of a larger call."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import torch
import torch.distributed as dist
from cases import map_of
from user_jobs import place_of

import ringspan as rs

SIZE = 8  # of case A15


def weights_of(group: dist.ProcessGroup, split: str, **arguments: Any) -> tuple[torch.Tensor, rs.ShardMap, list]:
    """The weights of this rank's rows, read off a call whose values are the identity; and its leaves."""
    rank, world = place_of(group)
    smap = map_of((split,), SIZE, world)
    q, k, _, _ = (torch.from_numpy(array).float() for array in oracle.draw(15, SIZE, 1, 1, SIZE))
    leaves = [smap.shard(x, rank, dim=2).requires_grad_() for x in (q, k, torch.eye(SIZE)[None, None])]
    out = rs.attention(*leaves, mask=rs.causal(), shard_map=smap, group=group, **arguments)
    return out, smap, leaves


def whole(out: torch.Tensor, smap: rs.ShardMap, group: dist.ProcessGroup) -> np.ndarray:
    """All rows in global order, on every rank."""
    return smap.unshard(out.detach(), group=group, dim=2)[0, 0].double().numpy()


def a15(group: dist.ProcessGroup, split: str, exchange: str) -> dict[str, float]:
    """Each weight is 0 or twice the oracle's; dV = out^T dO; the pairs are those that the documentation names."""
    q, k, _, dout = oracle.draw(15, SIZE, 1, 1, SIZE)
    keep = oracle.keep_of(("causal",), SIZE, SIZE)
    right = oracle.attend(q.astype(np.float32), k.astype(np.float32), np.eye(SIZE)[None, None], keep).out[0, 0]
    out, smap, leaves = weights_of(group, split, dropout_p=0.5, seed=3, exchange=exchange)
    weights = whole(out, smap, group)
    dropped = oracle.dropped_pairs(0.5, 3, 0, (1, 1, SIZE, SIZE))[0, 0]
    rank = place_of(group)[0]
    (dv,) = torch.autograd.grad(out, leaves[2], smap.shard(torch.from_numpy(dout).float(), rank, dim=2))
    plain, _, _ = weights_of(group, split, exchange=exchange)
    zero, _, _ = weights_of(group, split, exchange=exchange, dropout_p=0.0, seed=3)
    return {
        "weights": float(np.abs(weights - np.where(dropped, 0.0, 2 * right)).max()),
        "dv": float(np.abs(whole(dv, smap, group) - weights.T @ dout[0, 0]).max()),
        "p of 0": 0.0 if torch.equal(plain, zero) else np.inf,
    }


def share_of_zeros(group: dist.ProcessGroup, seeds: int) -> float:
    """Of the pairs that the mask keeps, over many drawn seeds."""
    zeros = pairs = 0
    torch.manual_seed(5 + place_of(group)[0])
    for _ in range(seeds):
        out, smap, _ = weights_of(group, "contiguous", dropout_p=0.5)
        kept = np.tril(np.ones((SIZE, SIZE), bool))
        zeros += int((whole(out, smap, group)[kept] == 0).sum())
        pairs += int(kept.sum())
    return zeros / pairs


def drawn_seeds(group: dist.ProcessGroup) -> list[np.ndarray]:
    """Two calls without a seed, and the first again after the generator of rank 0 was set back. By call."""
    rank, _ = place_of(group)
    found = []
    for restart in (True, False, True):
        if restart:
            torch.manual_seed(100 if rank == 0 else 1000 + len(found))
        out, smap, leaves = weights_of(group, "head_tail", dropout_p=0.5)
        gathered = whole(out, smap, group)
        # Backward repeats the agreed seed, not this rank's own: dV of ones is the sum of each column's weights.
        (dv,) = torch.autograd.grad(out.sum(), leaves[2])
        columns = whole(dv, smap, group)[:, 0]
        assert np.allclose(columns, gathered.sum(0), atol=1e-6)
        found.append(gathered)
    return found


def given_seeds_that_differ(group: dist.ProcessGroup) -> str:
    """What a rank is told."""
    try:
        weights_of(group, "contiguous", dropout_p=0.5, seed=20 + place_of(group)[0])
    except ValueError as error:
        return str(error)
    return "no error"


def vouched_without_a_seed(group: dist.ProcessGroup) -> str:
    """assume_agreed without a seed: what a rank is told."""
    try:
        weights_of(group, "contiguous", dropout_p=0.5, assume_agreed=True)
    except ValueError as error:
        return str(error)
    return "no error"

"""The blocks of a `BlockMask`: which are left out, which are kept whole, and which are left to the mask_mod.

A BlockMask lists, for each row of blocks, the blocks in which its mask_mod decides and those that are kept whole. A
block that is in neither list is masked, whatever the mask_mod says there:

    kv_indices 0: [0]  1: [1]     full_kv_indices 0: []  1: [0]        m .        m: mask_mod decides
                                                                       x m        x: kept whole, .: masked
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_ANY_LENGTH = 1 << 30  # block size of a BlockMask that PyTorch takes for any length


@dataclass(frozen=True)
class Blocks:
    """partial, full: bool [B or 1, N or 1, rows of blocks, columns of blocks]; sizes in positions."""

    partial: Tensor
    full: Tensor
    q_size: int
    kv_size: int

    def at(self, blocks: Tensor, q: Tensor, kv_len: int) -> Tensor:
        """`partial` or `full` for all pairs of some queries: [B or 1, N or 1, R, kv_len]. q: [R] or [B, R]."""
        rows = q // self.q_size
        if rows.dim() == 1:
            found = blocks[:, :, rows]
        else:
            entries = torch.arange(len(rows))[:, None]
            found = blocks.expand(len(rows), -1, -1, -1)[entries, :, rows].transpose(1, 2)
        return found[..., None].expand(*found.shape, min(self.kv_size, kv_len)).flatten(3)[..., :kv_len]


def blocks_of(block_mask: BlockMask, batch: int, heads: int, q_len: int, kv_len: int) -> Blocks:
    """Takes the lists apart. ValueError where they do not fit the call or do not describe a set of blocks."""
    q_size, kv_size = block_mask.BLOCK_SIZE
    made_for = tuple(block_mask.seq_lengths)
    if made_for != (q_len, kv_len) and (q_size, kv_size) != (_ANY_LENGTH, _ANY_LENGTH):
        raise ValueError(
            f"block_mask was made for Q_LEN {made_for[0]} and KV_LEN {made_for[1]}, but the sequences have {q_len} "
            f"queries and {kv_len} keys; make it for the whole sequences, not for this rank's shards"
        )
    num_rows, num_columns = -(-q_len // q_size), -(-kv_len // kv_size)
    partial = _listed("kv", block_mask.kv_num_blocks, block_mask.kv_indices, num_rows, num_columns)
    full = torch.zeros(1, 1, num_rows, num_columns, dtype=torch.bool)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed("full_kv", block_mask.full_kv_num_blocks, block_mask.full_kv_indices, num_rows, num_columns)
    for blocks in (partial, full):
        if blocks.shape[0] not in (1, batch) or blocks.shape[1] not in (1, heads):
            raise ValueError(
                f"block_mask is for {blocks.shape[0]} batch entries and {blocks.shape[1]} heads, but query has {batch} "
                f"and {heads}; make it with B=None or B={batch}, H=None or H={heads}"
            )
    both = (partial & full).nonzero()
    if len(both):
        raise ValueError(
            f"block_mask lists block {both[0, 2:].tolist()} in kv_indices and in full_kv_indices; a block is either "
            "left to the mask_mod or kept whole"
        )
    return Blocks(partial, full, q_size, kv_size)


def _listed(name: str, counts: Tensor, indices: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The first counts[b, h, row] of indices[b, h, row] as bool [B, H, rows, columns]."""
    if indices.device.type != "cpu":
        raise ValueError(f"{name}_indices of block_mask lies on {indices.device}; make it with device='cpu'")
    if indices.dim() != 4 or counts.shape != indices.shape[:3] or indices.shape[2] != num_rows:
        raise ValueError(
            f"{name}_num_blocks of block_mask has shape {list(counts.shape)}, {name}_indices {list(indices.shape)}; "
            f"{num_rows} rows of blocks need [B, H, {num_rows}] and [B, H, {num_rows}, n]"
        )
    width = indices.shape[3]
    if bool(((counts < 0) | (counts > width)).any()):
        raise ValueError(
            f"{name}_num_blocks of block_mask counts {int(counts.min())} to {int(counts.max())} blocks, but "
            f"{name}_indices has room for {width}"
        )
    used = torch.arange(width) < counts[..., None]
    wrong = indices[used & ((indices < 0) | (indices >= num_columns))]
    if len(wrong):
        raise ValueError(
            f"{name}_indices of block_mask names column {int(wrong[0])} of {num_columns} columns of blocks"
        )
    # What follows the used entries is undefined; it goes to one column more.
    columns = torch.where(used, indices, num_columns).long()
    times = torch.zeros(*indices.shape[:3], num_columns + 1, dtype=torch.int64)
    times = times.scatter_add(3, columns, torch.ones_like(columns))[..., :num_columns]
    twice = (times > 1).nonzero()
    if len(twice):
        raise ValueError(f"{name}_indices of block_mask lists block {twice[0, 2:].tolist()} twice")
    return times > 0

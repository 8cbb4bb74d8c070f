"""`flex_attention`: PyTorch's signature, over a sequence that is split over the ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ringspan.attention import attention_inside, tell_on_dtensors
from ringspan.call import check_scale, read_sizes, resolve_scale
from ringspan.entry import enters
from ringspan.flex.masks import MaskMod, to_mask
from ringspan.flex.mods import Pairs, ScoreMod, read_score_mod, scale_and_softcap
from ringspan.group import Group, name_and_world, rank_in, world_mismatch
from ringspan.masks import Mask, full
from ringspan.plain import check_tensors
from ringspan.shard_map import ShardMap

# kernel_options that choose or tune a GPU kernel, or promise something that this library need not be promised.
_SPEED_ONLY = (
    *("num_warps", "num_stages", "kpack", "matrix_instr_nonkdim", "waves_per_eu"),
    *("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
    *("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ"),
    *("FORCE_USE_FLEX_ATTENTION", "USE_TMA"),
)
_COMPILED = "ringspan.flex reads the values of masks and biases; outside of compiled code call to_mask or to_arguments"


@torch.compiler.disable(reason=_COMPILED)
@enters(tell_on_dtensors)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | MaskMod | Mask | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    shard_map: ShardMap | None = None,
    kv_shard_map: ShardMap | None = None,
    group: Group = None,
    schedule: Any = "auto",
    exchange: str = "auto",
    assume_agreed: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """FlexAttention of this rank's queries over the keys and values of all ranks of `group`.

    query [B, N, Sq, Dqk], key [B, Nkv, Skv, Dqk] and value [B, Nkv, Skv, Dv] are this rank's shards; the first ten
    arguments are those of torch.nn.attention.flex_attention.flex_attention. Indices that score_mod and mask_mod see are
    positions of the whole sequences, whatever the split. Returns [B, N, Sq, Dv]; with `return_lse` also the log-sum-exp
    [B, N, Sq] (natural logarithm, fp32, fp64 for fp64 inputs), with `return_aux` an AuxOutput instead. A row that keeps
    nothing has output 0 and lse -inf. Differentiable once in query, key, value and the tensors that score_mod adds;
    gradients of the latter are this rank's part: sum them over the group.

    score_mod: score * number, softcap * tanh(score / softcap), then + or - anything that does not hold the score, and
        where(condition, score, -inf). What is added becomes a tensor [B or 1, N or 1, Sq or 1, all keys].
    block_mask: a BlockMask of the whole sequences, a mask_mod, or what `to_mask` made of either once for many calls.
        A BlockMask means what PyTorch's kernels do with it: masked outside of its blocks, kept in full ones.
    enable_gqa: must be given where key has fewer heads than query.
    kernel_options: options that only tune kernels are accepted and have no effect.
    shard_map, kv_shard_map, group, schedule, exchange, assume_agreed: as for `ringspan.attention`.

    Raises NotImplementedError for a score_mod that is no such form, with the operation in the message, and ValueError
    for a bad argument, on every rank and before anything is sent; what a mod itself raises goes through, and to the
    peers as a ValueError. Under torch.compile the call breaks the graph, and fullgraph=True refuses it.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux are both given; ask with return_aux=AuxRequest(lse=True) alone")
    _check_kernel_options(kernel_options)
    check_tensors(query, key, value)
    arguments = to_arguments(
        query, key, score_mod, block_mask, scale, shard_map=shard_map, kv_shard_map=kv_shard_map, group=group
    )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, key has {key.shape[1]}; give enable_gqa=True for grouped queries"
        )
    out, stats = attention_inside(
        query,
        key,
        value,
        shard_map=shard_map,
        kv_shard_map=kv_shard_map,
        group=group,
        schedule=schedule,
        exchange=exchange,
        assume_agreed=assume_agreed,
        return_stats=True,
        **arguments,
    )
    if return_aux is not None:
        return out, AuxOutput(stats.lse if return_aux.lse else None, stats.max if return_aux.max_scores else None)
    return (out, stats.lse) if return_lse else out


@torch.compiler.disable(reason=_COMPILED)
def to_arguments(
    query: Tensor,
    key: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | MaskMod | Mask | Tensor | None = None,
    scale: float | None = None,
    *,
    shard_map: ShardMap | None = None,
    kv_shard_map: ShardMap | None = None,
    group: Group = None,
) -> dict[str, Any]:
    """The arguments mask, attn_mask, scale, softcap and bias with which `ringspan.attention` computes the same.

    Of query [B, N, Sq, Dqk] and key [B, Nkv, Skv, Dqk] only shapes and dtype are read. Arguments and errors as for
    `flex_attention`, but on this rank only: nothing is sent. With the result compiled code can call
    `ringspan.attention`.
    """
    sizes = read_sizes(query.shape, key.shape, key.shape, "BNSD", None)
    q_len, rows = _positions("query", shard_map, sizes.q_rows, group)
    kv_len, _ = _positions("key", shard_map if kv_shard_map is None else kv_shard_map, sizes.kv_rows, group)
    if rows.dim() == 2 and len(rows) != sizes.batch:
        raise ValueError(f"shard_map splits {len(rows)} batch entries, but query has {sizes.batch}")
    mask = block_mask
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise ValueError(f"block_mask is a tensor of {mask.dtype}; give what to_mask returns, or a BlockMask")
    if mask is not None and not isinstance(mask, Mask | Tensor):
        mask = to_mask(mask, q_len, kv_len, batch=sizes.batch, heads=sizes.q_heads, rows=rows)
    if scale is not None:
        check_scale(scale)
    arguments: dict[str, Any] = {"scale": resolve_scale(scale, sizes.qk_dim)}
    masks = [mask]
    if score_mod is not None:
        pairs = Pairs(sizes.batch, sizes.q_heads, q_len, kv_len, rows)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        form, mask = read_score_mod(score_mod, pairs, dtype)
        masks.append(mask)
        arguments = scale_and_softcap(form, arguments["scale"]) | {"bias": form.added}
    return arguments | _joined(masks)


def _positions(name: str, smap: ShardMap | None, num_rows: int, group: Group) -> tuple[int, Tensor]:
    """Length of the whole sequence, and the global positions of this rank's rows, padding as 0: [R], or [B, R]."""
    world, rank = name_and_world(group)[1], rank_in(group)
    if smap is None:
        return num_rows * world, torch.arange(rank * num_rows, (rank + 1) * num_rows)
    if not isinstance(smap, ShardMap):
        raise ValueError(f"the map of {name} is of {type(smap).__name__}; give a ShardMap or None")
    if smap.world_size != world:
        raise world_mismatch(f"the map of {name}", smap.world_size, group, world)
    if smap.local_rows(rank) != num_rows:
        raise ValueError(f"{name} has {num_rows} rows, but its map gives rank {rank} {smap.local_rows(rank)}")
    rows = [smap.positions(rank, entry).clamp(min=0) for entry in range(smap.num_lists)]
    return smap.seq_len, rows[0] if len(rows) == 1 else torch.stack(rows)


def _joined(masks: list[Mask | Tensor | None]) -> dict[str, Any]:
    """One mask and one tensor that keep together what all of `masks` keep."""
    mask, dense = full(), None
    for one in masks:
        if isinstance(one, Mask):
            mask = mask & one
        elif one is not None:
            dense = one if dense is None else dense & one
    return {"mask": mask, "attn_mask": dense}


def _check_kernel_options(options: dict[str, Any] | None) -> None:
    """Raises ValueError for an option that PyTorch does not document, NotImplementedError for another backend."""
    for name, value in (options or {}).items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if plain == "BACKEND":
            if value != "AUTO":
                raise NotImplementedError(
                    f"kernel_options {name}={value!r} is not offered; leave it out, or give 'AUTO'"
                )
        elif plain not in _SPEED_ONLY:
            raise ValueError(
                f"kernel_options has {name!r}; known are BACKEND, {', '.join(_SPEED_ONLY)}, also with fwd_ or "
                "bwd_ before them"
            )

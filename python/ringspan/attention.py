"""`attention`: exact attention over a sequence that is split over the ranks of a group."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ringspan.call import check_choices
from ringspan.entry import enters, has_dtensors
from ringspan.group import Group
from ringspan.masks import Full, Mask
from ringspan.numbers import check_flag
from ringspan.pairs import check_pairs
from ringspan.plain import attend
from ringspan.shard_map import ShardMap
from ringspan.stats import Stats

_FULL = Full()


def tell_on_dtensors(error: BaseException, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tells the ranks that share out the sequence of DTensors, query, key and value first, of an exception."""
    # Late: what is behind it needs torch.distributed.tensor.
    from ringspan.dtensor.peers import tell_sequence_group

    tell_sequence_group(error, args, kwargs)


@enters(tell_on_dtensors)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask = _FULL,
    shard_map: ShardMap | None = None,
    kv_shard_map: ShardMap | None = None,
    group: Group = None,
    layout: str = "BNSD",
    num_heads: int | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    bias: Any = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    offset: int = 0,
    head_offset: int = 0,
    batch_offset: int = 0,
    schedule: Any = "auto",
    exchange: str = "auto",
    return_stats: bool = False,
    assume_agreed: bool = False,
    total_heads: int | None = None,
) -> Tensor | tuple[Tensor, Stats]:
    """Softmax attention of this rank's queries over the keys and values of all ranks of `group`.

    query [B, N, Sq, Dqk], key [B, Nkv, Skv, Dqk], value [B, Nkv, Skv, Dv] (layout BNSD) are this rank's shards; also
    BSND, BSH and SBH (the last two need `num_heads`, the query heads), and TND, one batch entry without a batch axis.
    Nkv divides N. fp32, bf16, fp16 or fp64, alike; under autocast the autocast dtype. Returns this rank's
    [B, N, Sq, Dv] in the same layout and dtype, with `return_stats` also `Stats`. Differentiable once, in query, key,
    value, sink, a float attn_mask and a bias tensor.

    mask: which pairs take part, by global positions (`causal()`, `window(...)`, ...).
    shard_map: who holds which positions; None = contiguous and equal: the whole sequence is the local length times the
        number of ranks, and other lengths on another rank are refused. For lengths that the group does not divide, give
        ShardMap.contiguous(seq_len, world). kv_shard_map: the same for key and value; None = as `shard_map`.
    group: a ProcessGroup, a DeviceMesh of one axis, or None for one rank.
    scale: factor of q.k; None = 1/sqrt(Dqk).
    softcap: scores become softcap * tanh(score / softcap), before masks and biases.
    attn_mask: expands to [B, N, Sq, all keys]: rows are this rank's, in the order of the shard, columns are global
        positions. Bool: True takes part. Float: added to the scores; -inf masks. Beside `mask`: both must keep a pair.
    bias: `alibi(slopes)`, or a tensor like a float attn_mask. Gradients of masks and biases are this rank's part where
        ranks share elements.
    sink: [N] fp32 (fp64 also with fp64 tensors), one logit per query head that joins every row's softmax as a key whose
        value is 0; -inf = none. The statistics include it. Its gradient is this rank's part: sum it over the group.
    exchange: how messages are posted: "all_to_all" ("auto"), "p2p", or "all_gather" (schedule "gather", which "auto"
        then is).
    assume_agreed: skip the check that all ranks make the same call. A mismatch is then undefined.
    dropout_p: probability that a pair's weight becomes 0; the others are divided by 1 - dropout_p. Which pairs, depends
        on seed, offset and the pair's global index alone (docs/dropout.md), on no split, schedule or number of threads.
    seed: an int, an int64 tensor of one element (on the CPU), or None: drawn by PyTorch's default generator of group
        rank 0. offset: further calls of one seed take another one.
    head_offset, batch_offset, total_heads: the place of this call's heads and batch entries in an undivided call, so
        that tensor-parallel and data-parallel ranks draw what that call would; total_heads None = up to the last here.

    Raises ValueError for a bad argument and NotImplementedError for one that is not offered (docs/python.md has the
    table), both before anything is sent and on every rank; PeerError for a lost or stalled peer.
    """
    given = locals()
    check_pairs(given)
    check_choices(given)
    check_flag("return_stats", return_stats)
    check_flag("assume_agreed", assume_agreed)
    if has_dtensors(query, key, value, sink, attn_mask, bias):
        from ringspan.dtensor.attention import attend_on_dtensors

        return attend_on_dtensors(given)
    return attend(given)


# For fronts that are an entry themselves, so that one mistake is told once.
attention_inside = inspect.unwrap(attention)

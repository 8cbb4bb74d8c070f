"""Jobs of the pool about transformers models under context parallelism. One process with eager attention judges."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import hf_models
import torch
import torch.distributed as dist
from hf_models import difference, pair_of, positions_of, token_losses, tokens
from user_jobs import place_of

import ringspan as rs


def map_of(split, length, world):
    return rs.ShardMap.from_lengths(split) if isinstance(split, list) else getattr(rs.ShardMap, split)(length, world)


def whole_positions(name, length, documents=None):
    """position_ids [1, length] of one process."""
    lengths = [*documents, length - sum(documents)] if documents else [length]
    return positions_of(name, torch.cat([torch.arange(part) for part in lengths])[None])


def gradients(model, group=None):
    """All parameters' gradients as one row, summed over the group."""
    found = [torch.zeros_like(part) if part.grad is None else part.grad for part in model.parameters()]
    row = torch.cat([grad.flatten() for grad in found])
    if group is not None:
        dist.all_reduce(row, group=group)
    model.zero_grad(set_to_none=True)
    return row


def packed_mask(documents, length, causal):
    """bool [1, 1, length, length]: pairs of one document, for the judge."""
    owner = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    owner = torch.cat([owner, -torch.ones(length - len(owner), dtype=owner.dtype)])
    keep = (owner[:, None] == owner[None, :]) & (owner >= 0)[:, None]
    return (keep & torch.ones(length, length).tril().bool() if causal else keep)[None, None]


@dataclass(frozen=True)
class Batch:
    """What the model is called with. pad: tokens of padding on the left of entry 0 (negative: on the right)."""

    length: int = 22
    batch: int = 2
    pad: int = 0
    documents: list | None = None


def errors(group, name, split, checkpoint=False, changes=None, **called_with):
    """Differences of logits at valid tokens, displayed loss and gradients from one process with eager attention.

    With `checkpoint` layers are computed again in backward, which runs outside of the context. called_with: what a
    `Batch` says, by name.
    """
    rank, world = place_of(group)
    length, batch, pad, documents = astuple(Batch(**called_with))
    eager, ours = pair_of(name, **(changes or {}))
    ids, targets = tokens(batch, length), tokens(batch, length, seed=1)
    valid = torch.ones(batch, length, dtype=torch.int64)
    valid[0, slice(0, pad) if pad > 0 else slice(length + pad, length)] = 0 if pad else 1
    positions = whole_positions(name, length, documents)
    given = {"position_ids": positions, **hf_models.no_cache(name)}
    if documents:
        given["attention_mask"] = judge_of(name, documents, length)
    elif pad:
        given["attention_mask"] = valid
    logits = eager(input_ids=ids, **given).logits
    expected = (token_losses(logits, targets) * valid).sum() / valid.sum()
    expected.backward()

    if checkpoint:
        ours.train()
        ours.activation_checkpointing_enable({"use_reentrant": False})
    smap = map_of(split, length, world)
    local = {"input_ids": smap.shard(ids, rank, 1), "position_ids": smap.shard(positions, rank, 1)}
    if pad:
        local["attention_mask"] = smap.shard(valid, rank, 1)
    vouch = name not in rs.hf.CHECKED_MODELS
    with rs.hf.context_parallel(ours, group=group, shard_map=smap, documents=documents, assume_token_wise=vouch):
        logits_l = ours(**local).logits
    losses = token_losses(logits_l, smap.shard(targets, rank, 1))
    loss, shown = rs.masked_mean_loss(losses, smap.shard(valid, rank, 1).bool(), group=group)
    loss.backward()
    keep = valid.bool()
    found = smap.unshard(logits_l.detach(), group=group, dim=1)
    return {
        "logits": difference(found[keep], logits.detach()[keep]),
        "loss": abs(float(shown - expected)),
        "gradients": difference(gradients(ours, group), gradients(eager)),
    }


def judge_of(name, documents, length):
    """Packed documents for eager attention, which in several models would merge them: a mask for each kind of layer."""
    config = hf_models.config_of(name)
    causal = name not in hf_models.ENCODERS
    keep = packed_mask(documents, length, causal)
    place = torch.arange(length)
    apart = place[:, None] - place[None, :]
    window = getattr(config, "sliding_window", None)
    near = torch.ones(length, length, dtype=torch.bool)
    if window is not None:
        near = apart < window if causal else apart.abs() <= window
    chunk = getattr(config, "attention_chunk_size", None)
    inside = torch.cat([torch.arange(part) for part in [*documents, length - sum(documents)]])
    same = torch.ones(length, length, dtype=torch.bool)
    if chunk is not None:
        same = inside[:, None] // chunk == inside[None, :] // chunk

    def additive(kept):
        return torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)

    kinds = {"full_attention": additive(keep), "sliding_attention": additive(keep & near)}
    kinds["chunked_attention"] = additive(keep & same)
    if getattr(config, "layer_types", None) and len(set(config.layer_types)) > 1:
        return kinds
    return kinds["full_attention" if window is None else "sliding_attention"]


def many_errors(group, cases):
    """`errors` of each case."""
    return [errors(group, **case) for case in cases]


def orders_of_backward(group):
    """Two forwards, backward in the other order and outside of the contexts; a forward without backward between."""
    rank, world = place_of(group)
    eager, ours = pair_of("qwen2")
    ours.train()
    ours.activation_checkpointing_enable({"use_reentrant": False})
    maps = [rs.ShardMap.head_tail(17, world), rs.ShardMap.contiguous(9, world)]
    losses, expected = [], []
    for seed, smap in enumerate(maps):
        ids = tokens(1, smap.seq_len, seed)
        local = {"input_ids": smap.shard(ids, rank, 1), "position_ids": smap.positions(rank)[None]}
        with rs.hf.context_parallel(ours, group=group, shard_map=smap):
            losses.append(ours(**local).logits.square().sum())
            with torch.no_grad():
                ours(**local)
            ours(**local)
        eager(input_ids=ids, use_cache=False).logits.square().sum().backward()
        expected.append(gradients(eager))
    with rs.hf.context_parallel(ours, group=group, shard_map=maps[0]):
        losses[1].backward()
    second = gradients(ours, group)
    losses[0].backward()
    return [difference(gradients(ours, group), expected[0]), difference(second, expected[1])]


def refusals(group):
    """What each rank is told, where one or all call wrongly; and that the group works afterwards."""
    rank, world = place_of(group)
    _, ours = pair_of("llama")
    smap = rs.ShardMap.head_tail(12, world)
    right = {"input_ids": smap.shard(tokens(1, 12), rank, 1), "position_ids": smap.positions(rank)[None]}
    rows = right["input_ids"].shape[1]
    told = {}

    def call(name, **changes):
        given = {**right, **changes}
        try:
            with rs.hf.context_parallel(ours, group=group, shard_map=smap):
                ours(**given)
        except (ValueError, NotImplementedError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    only_last = rank == world - 1
    call("missing", position_ids=None)
    call("missing on one", **({"position_ids": None} if only_last else {}))
    call("local", position_ids=torch.arange(rows)[None])
    call("local on one", **({"position_ids": torch.arange(rows)[None]} if only_last else {}))
    call("labels", labels=right["input_ids"])
    call("cache", use_cache=True)
    call("rows on one", **({"input_ids": right["input_ids"][:, :-1]} if only_last else {}))
    call("numbers", attention_mask=torch.arange(rows)[None])
    call("right")
    return told


def per_entry_map(group):
    """A map that splits batch entries differently, with padding rows."""
    rank, world = place_of(group)
    eager, ours = pair_of("qwen2")
    smap = rs.ShardMap.per_document([[5, 8, 3], [11, 4]], world, seq_len=18)
    documents = [[5, 8, 3], [11, 4, 3]]
    ids = tokens(2, 18)
    positions = torch.cat([whole_positions("qwen2", 18, lengths) for lengths in documents])
    expected = [
        eager(input_ids=ids[b : b + 1], position_ids=positions[b : b + 1], use_cache=False).logits for b in range(2)
    ]
    local = {"input_ids": smap.shard(ids, rank, 1), "position_ids": smap.shard(positions, rank, 1)}
    with rs.hf.context_parallel(ours, group=group, shard_map=smap, documents=[[5, 8, 3], [11, 4]]):
        found = smap.unshard(ours(**local).logits.detach(), group=group, dim=1)
    return [difference(found[0, :16], expected[0][0, :16]), difference(found[1, :15], expected[1][0, :15])]


def dropout_is_drawn_alike(group):
    """Attention dropout in training: the same seed drops the same pairs on one rank and on several."""
    rank, world = place_of(group)
    _, ours = pair_of("llama", attention_dropout=0.3)
    ours.train()
    ids = tokens(1, 14)
    smap = rs.ShardMap.head_tail(14, world)
    torch.manual_seed(5)
    whole = ours(input_ids=ids, use_cache=False).logits.detach()
    torch.manual_seed(5)
    with rs.hf.context_parallel(ours, group=group, shard_map=smap):
        local = ours(input_ids=smap.shard(ids, rank, 1), position_ids=smap.positions(rank)[None]).logits.detach()
    ours.eval()
    undropped = ours(input_ids=ids, use_cache=False).logits.detach()
    return difference(smap.unshard(local, group=group, dim=1), whole), difference(whole, undropped)

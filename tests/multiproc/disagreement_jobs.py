"""Jobs of the pool in which one rank's call differs from the others' in one argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import Case, local_inputs, map_of, mask_of, pair_arguments, positions_of, to_layout
from npu_cases import prefix_mask, upper
from torch.distributed.device_mesh import DeviceMesh
from trials import Arena, Told

import ringspan as rs

OPS = torch.ops.ringspan


@dataclass(frozen=True)
class Side:
    """What one rank calls: a front and plain values. `more` has precedence over the case; see `_attend`."""

    front: str
    case: Case
    more: dict[str, Any] = field(default_factory=dict)

    def but(self, more: dict[str, Any] | None = None, **changes: Any) -> Side:
        """This side with other fields of the case, and with more."""
        return Side(self.front, self.case.but(**changes), {**self.more, **(more or {})})


@dataclass(frozen=True)
class Disagreement:
    """One rank calls `odd`, the others `common`. expected: "refused", "equal" in meaning, "either"
    of them, or "accepted" though results differ.

    words: what messages show, numbers or expressions. names: the arguments that they may name; () = any.
    """

    what: str
    common: Side
    odd: Side
    expected: str
    words: tuple = ()
    names: tuple[str, ...] = ()


@dataclass
class Answer:
    """What one rank saw of a disagreement."""

    is_odd: bool
    alone: str  # "" if both sides are right calls where all ranks make them
    forward: Told | None = None
    backward: Told | None = None
    is_exact: bool = True  # of a call that was accepted: bit for bit what this rank's side gives where all make it


def run(group: dist.ProcessGroup, fresh: list, disagreements: list[Disagreement]) -> list[Answer]:
    """What this rank saw of each."""
    arena = Arena(group, fresh)
    found = []
    for number, one in enumerate(disagreements):
        if arena.is_used_up:
            break
        found.append(_answer(arena, one, odd=number % arena.world))
    return found


def _answer(arena: Arena, one: Disagreement, odd: int) -> Answer:
    sides = {"common": one.common, "odd": one.odd}
    rights = {}
    for name, side in sides.items():
        try:
            outs, leaves = FRONTS[side.front](side, arena)
            rights[name] = [x.detach() for x in outs], _gradients(outs, leaves)
        except Exception as error:
            return Answer(arena.rank == odd, f"{name}: {type(error).__name__}: {error}")
    mine = "odd" if arena.rank == odd else "common"
    outs_right, gradients_right = rights[mine]
    answer = Answer(arena.rank == odd, "")
    kept: dict[str, Any] = {}

    def forward() -> None:
        kept["outs"], kept["leaves"] = FRONTS[sides[mine].front](sides[mine], arena)

    answer.forward = arena.trial(forward)
    if not all(arena.share("outs" in kept)):
        return answer
    answer.is_exact = all(torch.equal(x.detach(), y) for x, y in zip(kept["outs"], outs_right, strict=True))
    if not any(arena.share(gradients_right is not None)):
        return answer

    def backward() -> None:
        kept["gradients"] = _gradients(kept["outs"], kept["leaves"])

    answer.backward = arena.trial(backward)
    gradients = kept.get("gradients")
    if all(arena.share("gradients" in kept)) and gradients and one.expected == "equal":
        answer.is_exact &= all(_alike(x, y) for x, y in zip(gradients, gradients_right, strict=True))
    return answer


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """p2p adds up in the order of its plan, which is the same; nothing may differ but where nothing is."""
    return x.shape == y.shape and bool(((x - y).abs() <= 1e-6 * y.abs().max().clamp(min=1e-30)).all())


def _gradients(outs: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor] | None:
    wanted = [x for x in leaves if x.requires_grad]
    if not wanted or not outs[0].requires_grad:
        return None
    return list(torch.autograd.grad(outs[0], wanted, torch.ones_like(outs[0]), allow_unused=True))


def _attend(side: Side, arena: Arena) -> tuple[list, list]:
    """rs.attention. more: "drop" (keywords to leave out), "grads" (which of q, k, v, b(ias), s(ink)), "mask" (a name
    of MASKS and its arguments), "bias_dtype", "slopes", "as_mesh", "strided"; all others are keywords.
    """
    case, more = side.case, dict(side.more)
    q, k, v, _, _ = local_inputs(case, arena.rank, arena.world)
    wanted = more.pop("grads", "qkvbs")
    leaves = [to_layout(x, case.layout).requires_grad_(one in wanted) for one, x in zip("qkv", (q, k, v), strict=True)]
    given: dict[str, Any] = {
        "mask": mask_of(case.mask),
        "shard_map": map_of(case.split, case.seq_len, arena.world),
        "layout": case.layout,
        "num_heads": case.q_heads if case.layout in ("BSH", "SBH") else None,
        "scale": case.scale,
        "exchange": case.exchange,
        "schedule": case.schedule,
        "group": DeviceMesh.from_group(arena.group, "cpu") if more.pop("as_mesh", False) else arena.group,
    }
    if case.kv_split is not None:
        given["kv_shard_map"] = map_of(case.kv_split, case.kv_len or case.seq_len, arena.world)
    pairs, bias = pair_arguments(case, positions_of(case, arena.rank, arena.world)[0])
    if bias is not None:
        bias = _cut(bias.detach(), more.pop("bias_axes", None)).to(more.pop("bias_dtype", bias.dtype))
        bias = bias.requires_grad_("b" in wanted)
        name = more.pop("bias_as", next(name for name in pairs if name in ("bias", "attn_mask") and name != "softcap"))
        for other in ("bias", "attn_mask"):
            if isinstance(pairs.get(other), torch.Tensor) and pairs[other].is_floating_point():
                del pairs[other]
        pairs[name] = bias
    if "mask_axes" in more:
        pairs["attn_mask"] = _cut(pairs["attn_mask"], more.pop("mask_axes"))
    if case.sink is not None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        given["sink"] = torch.tensor(case.sink, dtype=wide, requires_grad="s" in wanted)
    if "slopes" in more:
        given["bias"] = rs.alibi(torch.tensor(more.pop("slopes"), dtype=torch.float32), more.pop("align", None))
    if "mask" in more:
        name, *rest = more.pop("mask")
        given["mask"] = MASKS[name](*rest)
    if "segments" in more:
        given["shard_map"] = rs.ShardMap.from_segments(more.pop("segments"), seq_len=case.seq_len)
    if more.pop("strided", False):
        leaves = [_strided(x) for x in leaves]
    dropped = more.pop("drop", ())
    given |= pairs | more
    result = rs.attention(*leaves, **{name: value for name, value in given.items() if name not in dropped})
    outs = [result] if isinstance(result, torch.Tensor) else [result[0]]
    others = (given.get(name) for name in ("bias", "attn_mask", "sink"))
    return outs, [*leaves, *(x for x in others if isinstance(x, torch.Tensor) and x.is_floating_point())]


def _cut(x: torch.Tensor, axes: str | None) -> torch.Tensor:
    """Only the first of the axes that are not named."""
    for place, axis in enumerate("BNSK"):
        if axes is not None and axis not in axes:
            x = x.narrow(place, 0, 1)
    return x.contiguous()


def _strided(x: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x.detach()
    return wide[..., ::2].requires_grad_(x.requires_grad)


MASKS: dict[str, Callable[..., rs.Mask]] = {
    "lengths": lambda lengths, as_tensor: rs.documents(lengths=torch.tensor(lengths) if as_tensor else lengths),
    "ids": lambda ids: rs.documents(ids=torch.tensor(ids)),
    "inside": lambda lengths, width: rs.documents(lengths=lengths, inside=rs.window(width)),
    "inside chunks": lambda lengths, size: rs.documents(lengths=lengths, inside=rs.chunked(size)),
    "prefix": lambda lengths: rs.prefix(lengths),
    "causal, aligned": lambda align: rs.causal(align),
    "window": lambda left, right: rs.window(left, right),
    "window, then causal": lambda left: rs.window(left) & rs.causal(),
    "causal, then window": lambda left: rs.causal() & rs.window(left),
    "either": lambda left: rs.window(left) | rs.prefix(2),
}


def _contract(side: Side, arena: Arena) -> tuple[list, list]:
    """fusion_attention_v3.cp. more: "pse" (axes), "pse_dtype", "full_mask" (axes), "compressed", "ends", "kv_ends",
    "grads"; all others are keywords. Inputs are those of the case.
    """
    case, more = side.case, dict(side.more)
    q, k, v, _, _ = local_inputs(case, arena.rank, arena.world)
    wanted = more.pop("grads", "qkv")
    leaves = [to_layout(x, case.layout).requires_grad_(one in wanted) for one, x in zip("qkv", (q, k, v), strict=True)]
    source = np.random.default_rng(case.seed)
    whole = source.standard_normal((case.batch, case.q_heads, q.shape[2], case.seq_len))
    pair = torch.from_numpy(whole).to(q.dtype)
    given: dict[str, Any] = {"scale": case.scale or 0.3, "schedule": case.schedule, "exchange": case.exchange}
    if "pse" in more:
        given["pse"] = _cut(pair, more.pop("pse")).to(getattr(torch, more.pop("pse_dtype", case.dtype)))
    if "full_mask" in more:
        given["atten_mask"] = _cut(pair > 1, more.pop("full_mask"))
    if more.pop("compressed", False):
        given["atten_mask"] = prefix_mask() if more.get("sparse_mode") == 6 else upper()
    if case.sink is not None:
        given["sink"] = torch.tensor(case.sink, dtype=torch.float32)
    for name, key in (("ends", "actual_seq_qlen"), ("kv_ends", "actual_seq_kvlen")):
        if name in more:
            given[key] = torch.tensor(more.pop(name))
    smap = map_of(case.split, case.seq_len, arena.world).to_tensor()
    given |= {"q_map": smap, "kv_map": smap}
    if case.kv_split is not None:
        given["kv_map"] = map_of(case.kv_split, case.seq_len, arena.world).to_tensor()
    dropped = more.pop("drop", ())
    given = {name: value for name, value in (given | more).items() if name not in dropped}
    out, *_ = OPS.fusion_attention_v3.cp(*leaves, case.q_heads, case.layout, group_name=arena.name, **given)
    return [out], leaves


def _unshard(side: Side, arena: Arena) -> tuple[list, list]:
    """ShardMap.unshard of rows [rows, width] or [batch, rows, width] along `dim`."""
    case, more = side.case, dict(side.more)
    smap = map_of(case.split, case.seq_len, arena.world)
    dim = more.get("dim", 0)
    shape = list(more.pop("shape", (3,)))
    shape.insert(dim % (len(shape) + 1), smap.local_rows(arena.rank))
    dtype = getattr(torch, case.dtype)
    x = torch.arange(float(np.prod(shape)), dtype=torch.float64).reshape(shape).to(dtype)
    x.requires_grad_(more.pop("wants", False))
    return [smap.unshard(x, group=arena.group, **{"dim": dim, **more})], [x]


def _loss(side: Side, arena: Arena) -> tuple[list, list]:
    """masked_mean_loss of as many tokens as the case has positions, or "tokens"."""
    more = dict(side.more)
    tokens = more.pop("tokens", side.case.seq_len)
    x = torch.linspace(0, 1, tokens, dtype=getattr(torch, side.case.dtype)).requires_grad_(more.pop("wants", True))
    valid = torch.ones(tokens, dtype=torch.bool)
    loss, shown = rs.masked_mean_loss(x, valid, group=arena.group, **more)
    return [shown, loss], [x]


FRONTS: dict[str, Callable[[Side, Arena], tuple[list, list]]] = {
    "attention": _attend,
    "contract": _contract,
    "unshard": _unshard,
    "loss": _loss,
}

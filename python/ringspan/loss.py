"""Mean loss over the valid tokens of a sequence that is split over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.gather import _resolve
from ringspan.group import Group, name_and_world, tell_peers


def masked_mean_loss(
    loss_per_token: Tensor, valid: Tensor, *, group: Group = None, averaged_by: int = 1
) -> tuple[Tensor, Tensor]:
    """This rank's sum over the group's number of valid tokens, and the mean over the group to display.

    loss_per_token: any shape, this rank's tokens; valid: bool of that shape. The first result is to be
    differentiated: gradients *summed* over the ranks of the group are those of the mean. Where DDP or FSDP will divide
    gradients by n, give `averaged_by=n`. Losses at tokens that are not valid are never read (nan does no harm), and a
    rank without valid tokens stays attached to its graph. The second result, without gradient, is the same on every
    rank; it is 0 where no rank has a valid token. One all_reduce of two numbers over `group`.

    Raises ValueError for a shape or type that does not fit, on every rank.
    """
    group_name, _ = name_and_world(group)
    try:
        _check(loss_per_token, valid, averaged_by)
    except ValueError as error:
        tell_peers(group_name, error)
        raise
    kept = torch.where(valid, loss_per_token, torch.zeros_like(loss_per_token)).sum()
    totals = torch.stack([kept.detach().double(), valid.sum().double()])
    if group_name:
        torch.ops.ringspan._agree(group_name, "masked_mean_loss")
        dist.all_reduce(totals, group=_resolve(group_name))
    count = totals[1].clamp(min=1)
    return kept * (averaged_by / count).to(kept.dtype), (totals[0] / count).to(kept.dtype)


def _check(loss_per_token: Tensor, valid: Tensor, averaged_by: int) -> None:
    if valid.dtype != torch.bool:
        raise ValueError(f"valid is of {valid.dtype}; give torch.bool, True where a token counts")
    if valid.shape != loss_per_token.shape:
        raise ValueError(
            f"valid has shape {list(valid.shape)}, but loss_per_token has {list(loss_per_token.shape)}; they must agree"
        )
    if not loss_per_token.is_floating_point():
        raise ValueError(f"loss_per_token is of {loss_per_token.dtype}; give a floating point dtype")
    if not averaged_by > 0:
        raise ValueError(f"averaged_by is {averaged_by}; give the number of ranks that gradients are averaged over")

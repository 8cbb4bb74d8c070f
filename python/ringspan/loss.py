"""Mean loss over the valid tokens of a sequence that is split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ringspan.entry import Telling, enters
from ringspan.group import LOCAL, Group, group_of, name_and_world
from ringspan.numbers import is_beyond_int64, is_whole, shown
from ringspan.place import place_of_caller


@enters()
def masked_mean_loss(
    loss_per_token: Tensor,
    valid: Tensor,
    *,
    group: Group = None,
    averaged_by: int = 1,
    step_valid: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """This rank's sum over the group's number of valid tokens, and the mean over the group to display.

    loss_per_token: any shape, this rank's tokens; valid: bool of that shape. The first result, of the dtype of the
    losses, is to be differentiated: gradients *summed* over the ranks of the group are those of the mean. Where DDP or
    FSDP will divide gradients by n, give `averaged_by=n`. Losses at tokens that are not valid are never read (nan does
    no harm), and a rank without valid tokens stays attached to its graph. The second result, without gradient, is the
    same on every rank; it is 0 where no rank has a valid token. One all_reduce of three numbers over `group`.

    step_valid: where a step adds up the gradients of several calls (micro-batches, several losses of one mean), this
    rank's number of valid tokens in all of them: an int, or an integer tensor of one element. Both results are then
    this call's share of the mean over the whole step: added up over its calls they are that mean.

    Raises ValueError, on every rank, for a shape or type that does not fit, for fewer valid tokens in the step than in
    the call, and where ranks differ in averaged_by.
    """
    group_name, _ = name_and_world(group)
    _check(loss_per_token, valid, averaged_by, step_valid)
    # fp16 holds a mean, but not the sum of a few thousand losses.
    wide = torch.promote_types(loss_per_token.dtype, torch.float32)
    kept = torch.where(valid, loss_per_token, torch.zeros_like(loss_per_token)).sum(dtype=wide)
    count = valid.sum()
    whole = count if step_valid is None else count.new_zeros(()) + step_valid
    local = torch.stack([kept.detach().double(), count.double(), whole.reshape(()).double()])
    call = f"masked_mean_loss averaged_by {averaged_by} step_valid {'None' if step_valid is None else 'given'}"
    total, _, tokens = _sum_totals(local, group_name, call)
    tokens = tokens.clamp(min=1)
    loss = kept * (averaged_by / tokens).to(wide)
    return loss.to(loss_per_token.dtype), (total / tokens).to(loss_per_token.dtype)


@torch.library.custom_op("ringspan::_sum_totals", mutates_args=())
def _sum_totals(totals: Tensor, group_name: str | None, call: str) -> Tensor:
    """(sum of losses, valid tokens, valid tokens of the step), added up over the ranks. Opaque to tracing.

    What depends on values is checked in here, because compiled code runs nothing else of `masked_mean_loss`.
    """
    if group_name is None:
        torch.ops.ringspan._check_alone("masked_mean_loss")
    group = group_of(group_name) if group_name else LOCAL
    summed = totals.clone()
    with Telling(group):
        _, count, step = totals.tolist()
        if step < count:
            raise ValueError(
                f"step_valid is {step:.0f}, but this call alone has {count:.0f} valid tokens; give this rank's number "
                "of valid tokens in all calls of the step"
            )
        if group_name:
            summed = torch.ops.ringspan._all_reduce(totals, group_name, call, place_of_caller(), False)
    return summed


@_sum_totals.register_fake
def _(totals: Tensor, group_name: str | None, call: str) -> Tensor:
    return torch.empty_like(totals)


def _check(loss_per_token: Tensor, valid: Tensor, averaged_by: int, step_valid: Tensor | int | None) -> None:
    for name, one in (("loss_per_token", loss_per_token), ("valid", valid)):
        if not isinstance(one, Tensor):
            raise ValueError(f"{name} is of {type(one).__name__}; give a tensor")
    if valid.dtype != torch.bool:
        raise ValueError(f"valid is of {valid.dtype}; give torch.bool, True where a token counts")
    if valid.shape != loss_per_token.shape:
        raise ValueError(
            f"valid has shape {list(valid.shape)}, but loss_per_token has {list(loss_per_token.shape)}; they must agree"
        )
    if valid.device != loss_per_token.device:
        raise ValueError(
            f"valid lies on {valid.device}, loss_per_token on {loss_per_token.device}; put them on one device"
        )
    if not loss_per_token.is_floating_point():
        raise ValueError(f"loss_per_token is of {loss_per_token.dtype}; give a floating point dtype")
    if not is_whole(averaged_by) or not averaged_by > 0:
        raise ValueError(
            f"averaged_by is {shown(averaged_by)}; give the number of ranks that gradients are averaged over"
        )
    _check_step(step_valid, loss_per_token.device)


def _check_step(step_valid: Tensor | int | None, device: torch.device) -> None:
    if isinstance(step_valid, Tensor):
        if step_valid.numel() != 1 or step_valid.is_floating_point() or step_valid.dtype == torch.bool:
            raise ValueError(
                f"step_valid is {step_valid.dtype} {list(step_valid.shape)}; give an int, or an integer tensor of one "
                "element"
            )
        if step_valid.device.type == "meta" and device.type != "meta":
            raise ValueError(
                f"step_valid lies on {step_valid.device}, loss_per_token on {device}; it has no value there"
            )
    elif step_valid is not None and (not is_whole(step_valid) or is_beyond_int64(step_valid)):
        raise ValueError(
            f"step_valid is {shown(step_valid)}; give this rank's number of valid tokens in the whole step"
        )
